//! The real members over real providers, three servers of one process, each polled in turn.
//!
//! A server that is not polled stands still, as a stopped process does: what its memory takes part
//! in, it takes part in without its processor.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{Device, Role};
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_fabric_sim::{SimOptions, SimWorld};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_paxos::{
    ClusterId, Command, Configuration, Kind, Layout, LogMemory, NodeId, Options, Position,
    RoleName, Start,
};
use beeline_replicated_log::{Durability, Member, MemberMemory};

const CLUSTER: ClusterId = ClusterId(0xfab);
const SERVERS: usize = 3;
const BOUND: Duration = Duration::from_secs(20);

/// Formats a log through its memory object.
#[derive(Debug)]
struct Raw(MemberMemory);

impl LogMemory for Raw {
    fn load(&self, _offset: u64, _into: &mut [u8]) {}

    fn store(&mut self, offset: u64, bytes: &[u8]) {
        beeline_os::memory::copy_in(self.0.log.as_ref(), offset as usize, bytes);
    }

    fn publish(&mut self, _status: beeline_paxos::Status) {}
}

/// Time of a provider: real, or a world's.
enum Time {
    Real(Instant),
    Virtual(SimWorld),
}

impl Time {
    fn now_ns(&self) -> u64 {
        match self {
            Self::Real(start) => start.elapsed().as_nanos() as u64,
            Self::Virtual(world) => world.now_ns(),
        }
    }

    fn pass(&self) {
        match self {
            Self::Real(_) => std::thread::yield_now(),
            Self::Virtual(world) => world.run_for(Duration::from_micros(100)),
        }
    }
}

struct Cluster {
    time: Time,
    members: Vec<Member>,
    /// The payloads each server applied.
    applied: Vec<Vec<Vec<u8>>>,
    step_downs: usize,
}

fn id(node: usize) -> NodeId {
    NodeId(node as u16)
}

impl Cluster {
    fn new(time: Time, device: impl Fn(usize) -> Arc<dyn Device>) -> Self {
        let layout = Layout::new(256, 256).unwrap();
        let all: Vec<_> = (0..SERVERS).map(id).collect();
        let open = |node| {
            let device = device(node);
            let memory = MemberMemory {
                log: device.allocate_memory(layout.region_bytes() as usize).unwrap(),
                status: device.allocate_memory(4096).unwrap(),
                vote: device.allocate_memory(4096).unwrap(),
            };
            layout.format(CLUSTER, &mut Raw(memory.clone()));
            let start = Start {
                id: id(node),
                cluster: CLUSTER,
                layout,
                vote_word: 0,
                snapshot: Position::NONE,
                chosen: Position::NONE,
                reached: Position::NONE,
                configuration: Configuration::initial(&all),
                seed: node as u64,
            };
            let options = Options::default();
            Member::open(start, options, Durability::Process, memory, device).unwrap()
        };
        let mut members: Vec<_> = (0..SERVERS).map(open).collect();
        for one in 0..SERVERS {
            for other in one + 1..SERVERS {
                let near = members[one].listen(id(other)).unwrap();
                let far = members[other].listen(id(one)).unwrap();
                members[one].connect(id(other), &far, Role::Active).unwrap();
                members[other].connect(id(one), &near, Role::Passive).unwrap();
            }
        }
        Self { time, members, applied: vec![Vec::new(); SERVERS], step_downs: 0 }
    }

    fn handle(&mut self, node: usize, upward: &[Command]) {
        let mut payload = Vec::new();
        for command in upward {
            match command {
                Command::Apply { first, last } => {
                    for position in (first.0..=last.0).map(Position) {
                        let kind = self.members[node].replica().entry(position, &mut payload);
                        if kind == Kind::Commands {
                            self.applied[node].push(payload.clone());
                        }
                    }
                }
                Command::SteppedDown { .. } => self.step_downs += 1,
                _ => {}
            }
        }
    }

    /// Polls some servers until `done`.
    fn until(&mut self, nodes: &[usize], what: &str, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            for node in nodes {
                let mut upward = Vec::new();
                let now_ns = self.time.now_ns();
                self.members[*node].poll(now_ns, &mut upward).unwrap();
                self.handle(*node, &upward);
            }
            self.time.pass();
            assert!(start.elapsed() < BOUND, "waited too long until {what}");
        }
    }

    fn leads(&self, node: usize) -> bool {
        self.members[node].replica().role() == RoleName::Leader
    }

    fn elect(&mut self, nodes: &[usize]) -> usize {
        self.until(nodes, "a leader is elected", |cluster| {
            nodes.iter().any(|node| cluster.leads(*node))
        });
        nodes.iter().copied().find(|node| self.leads(*node)).unwrap()
    }

    fn propose(&mut self, node: usize, payload: &[u8]) {
        let mut upward = Vec::new();
        self.members[node].propose(payload, &mut upward).unwrap().unwrap();
        self.handle(node, &upward);
    }
}

fn commits_and_converges(mut cluster: Cluster, followers_stand_still: bool) {
    let all: Vec<_> = (0..SERVERS).collect();
    let leader = cluster.elect(&all);
    let wanted: Vec<Vec<u8>> = (0..100_u32).map(|number| vec![7; number as usize]).collect();
    // The first use of a key may ask the follower's library; then its memory is open.
    cluster.propose(leader, &wanted[0]);
    cluster.until(&all, "one entry is committed", |cluster| cluster.applied[leader].len() == 1);
    let polled = if followers_stand_still { vec![leader] } else { all.clone() };
    for payload in &wanted[1..] {
        cluster.propose(leader, payload);
    }
    cluster.until(&polled, "all entries are committed", |cluster| {
        cluster.applied[leader].len() == wanted.len()
    });
    cluster.until(&all, "all servers applied all entries", |cluster| {
        cluster.applied.iter().all(|applied| applied.len() == wanted.len())
    });
    assert!(cluster.applied.iter().all(|applied| *applied == wanted));
}

fn a_hung_leader_is_fenced_off(mut cluster: Cluster) {
    let all: Vec<_> = (0..SERVERS).collect();
    let old = cluster.elect(&all);
    cluster.propose(old, b"before");
    cluster.until(&all, "everybody applied the first entry", |cluster| {
        cluster.applied.iter().all(|applied| applied.len() == 1)
    });
    let others: Vec<_> = all.iter().copied().filter(|node| *node != old).collect();
    let new = cluster.elect(&others);
    cluster.propose(new, b"meanwhile");
    cluster.until(&others, "the others agreed", |cluster| cluster.applied[new].len() == 2);
    // The old one wakes up and believes that it leads.
    assert!(cluster.leads(old));
    cluster.propose(old, b"too late");
    cluster.until(&all, "the old leader steps down and follows", |cluster| {
        cluster.step_downs > 0 && cluster.applied.iter().all(|applied| applied.len() == 2)
    });
    cluster.propose(new, b"after");
    cluster.until(&all, "everybody applied the last entry", |cluster| {
        cluster.applied.iter().all(|applied| applied.len() == 3)
    });
    for applied in &cluster.applied {
        assert_eq!(applied[..], [b"before".to_vec(), b"meanwhile".to_vec(), b"after".to_vec()]);
    }
}

fn shm() -> Cluster {
    Cluster::new(Time::Real(Instant::now()), |_| ShmDevice::open(ShmConfig::default()).unwrap())
}

fn tcp() -> Cluster {
    Cluster::new(Time::Real(Instant::now()), |_| TcpDevice::open(TcpConfig::default()).unwrap())
}

fn sim(options: SimOptions) -> Cluster {
    let world = SimWorld::new(1, options);
    Cluster::new(Time::Virtual(world.clone()), |node| world.device(node as u32))
}

/// An answer that takes longer than the pause between two requests is an answer all the same: each
/// request of its own connection would undo the promise made for the one before, for ever. So it
/// went on a loaded machine, where taking the log back took longer than a heartbeat.
#[test]
fn links_slower_than_a_heartbeat_delay_leaders_and_do_not_prevent_them() {
    for one_way_ms in [20, 70, 110] {
        let delay = one_way_ms * 1_000_000;
        let options = SimOptions { latency_ns: delay..=delay + 1_000_000, ..SimOptions::default() };
        let mut cluster = sim(options);
        let all: Vec<_> = (0..SERVERS).collect();
        let leader = cluster.elect(&all);
        cluster.propose(leader, b"slowly");
        cluster.until(&all, "everybody applied the entry", |cluster| {
            cluster.applied.iter().all(|applied| applied.len() == 1)
        });
    }
}

/// Nobody ran, so nobody was silent: followers that took a pause of their own for the leader's would
/// elect another one whenever an overloaded machine gives them the processor again.
#[test]
fn a_machine_that_stands_still_for_seconds_keeps_its_leader() {
    let mut cluster = sim(SimOptions::default());
    let all: Vec<_> = (0..SERVERS).collect();
    let leader = cluster.elect(&all);
    let term = cluster.members[leader].replica().term();
    for (round, pause_ms) in [400, 1_000, 5_000].into_iter().enumerate() {
        cluster.propose(leader, b"before");
        cluster.until(&all, "everybody applied the entry", |cluster| {
            cluster.applied.iter().all(|applied| applied.len() == round + 1)
        });
        if let Time::Virtual(world) = &cluster.time {
            world.run_for(Duration::from_millis(pause_ms));
        }
        let since_ns = cluster.time.now_ns();
        cluster.until(&all, "a second passes", |cluster| {
            cluster.time.now_ns() - since_ns > 1_000_000_000
        });
        assert!(cluster.leads(leader), "a pause of {pause_ms} ms cost the leader");
        assert_eq!(cluster.members[leader].replica().term(), term);
    }
}

/// A member that died between its offer of a snapshot and its sending must not keep others from
/// giving theirs: the one that lags would lag for ever, and its reads would wait in vain.
fn an_offer_that_came_to_nothing_gives_way(mut cluster: Cluster) {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("snapshot");
    std::fs::write(&file, [7; 200_000]).unwrap();
    let all: Vec<_> = (0..SERVERS).collect();
    cluster.elect(&all);
    cluster.members[2].take_snapshots(place.path().join("incoming"));
    let offer = |cluster: &mut Cluster, from: usize, position| {
        let now_ns = cluster.time.now_ns();
        cluster.members[from].offer_snapshot(id(2), &file, position, now_ns).unwrap();
    };
    offer(&mut cluster, 0, Position(1000));
    // It accepts; who offered stands still for good.
    let since_ns = cluster.time.now_ns();
    cluster.until(&[1, 2], "it has accepted", |cluster| {
        cluster.time.now_ns() - since_ns > 200_000_000
    });
    let mut received = None;
    for _ in 0..8 {
        offer(&mut cluster, 1, Position(2000));
        let since_ns = cluster.time.now_ns();
        cluster.until(&[1, 2], "a second passes", |cluster| {
            cluster.time.now_ns() - since_ns > 1_000_000_000
        });
        received = cluster.members[2].received();
        if received.is_some() {
            break;
        }
    }
    let received = received.unwrap();
    assert_eq!((received.from, received.position), (id(1), Position(2000)));
    assert_eq!(std::fs::read(received.path).unwrap(), [7; 200_000]);
}

#[test]
fn an_offered_snapshot_that_never_comes_gives_way_over_shm() {
    an_offer_that_came_to_nothing_gives_way(shm());
}

#[test]
fn an_offered_snapshot_that_never_comes_gives_way_over_tcp() {
    an_offer_that_came_to_nothing_gives_way(tcp());
}

#[test]
fn an_offered_snapshot_that_never_comes_gives_way_in_simulation() {
    an_offer_that_came_to_nothing_gives_way(sim(SimOptions::default()));
}

#[test]
fn shm_commits_while_followers_stand_still() {
    commits_and_converges(shm(), true);
}

#[test]
fn tcp_commits_while_followers_stand_still() {
    commits_and_converges(tcp(), true);
}

#[test]
fn sim_commits_while_followers_stand_still() {
    commits_and_converges(sim(SimOptions::default()), true);
    commits_and_converges(sim(SimOptions::slow_placement()), true);
}

#[test]
fn a_hung_leader_is_fenced_off_over_shm() {
    a_hung_leader_is_fenced_off(shm());
}

#[test]
fn a_hung_leader_is_fenced_off_over_tcp() {
    a_hung_leader_is_fenced_off(tcp());
}

#[test]
fn a_hung_leader_is_fenced_off_in_simulation() {
    a_hung_leader_is_fenced_off(sim(SimOptions::default()));
}
