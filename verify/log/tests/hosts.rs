//! Hosts: members of many clusters on few threads, which rest when there is nothing to do.
//!
//! `BEELINE_GROUPS=n` runs the tests with so many clusters, as far as the limit of open files allows.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]
#![allow(dead_code, reason = "what the tests of servers share has more than these need")]

mod common;

use std::io::{self, Read};
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_replicated_log::{
    Boot, ClusterId, Consistency, Contact, Durability, Founding, Handle, Home, Host, HostConfig,
    InProcess, Layout, NO_SESSION, NodeError, NodeId, Position, Refusal, RoleName, SnapshotWriter,
    StateMachine, ThreadStatus, Transport, TransportError,
};
use beeline_verify_log::lists::{Lists, items};
use beeline_verify_log::machine::append;
use common::{Gate, LIMIT, Provider, eventually, shm, tcp};

/// Lists; a query of nothing keeps the thread until the gate is open.
#[derive(Default)]
struct Gated {
    lists: Lists,
    gate: Option<Arc<Gate>>,
    /// Restoring takes until this one is open.
    restoring: Option<Arc<Gate>>,
}

impl StateMachine for Gated {
    fn apply(&mut self, position: Position, command: &[u8], reply: &mut Vec<u8>) {
        self.lists.apply(position, command, reply);
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        self.lists.snapshot()
    }

    fn restore(&mut self, position: Position, reader: &mut dyn Read) -> io::Result<()> {
        if let Some(gate) = &self.restoring {
            gate.reached.store(true, Ordering::SeqCst);
            eventually("it goes on", || gate.open.load(Ordering::SeqCst).then_some(()));
        }
        self.lists.restore(position, reader)
    }

    fn query(&mut self, query: &[u8], reply: &mut Vec<u8>) {
        if let (Some(gate), true) = (&self.gate, query.is_empty()) {
            gate.reached.store(true, Ordering::SeqCst);
            while !gate.open.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        self.lists.query(query, reply);
    }
}

struct Hosts {
    groups: usize,
    threads: usize,
    home: tempfile::TempDir,
    transport: Arc<InProcess>,
    provider: Provider,
    gate: Arc<Gate>,
    /// Of the first group's members that are started from now on.
    restoring: Option<Arc<Gate>>,
    hosts: Vec<Option<Host>>,
    /// By host, by group.
    handles: Vec<Vec<Handle>>,
}

fn cluster(group: usize) -> ClusterId {
    ClusterId(1000 + group as u64)
}

fn id(host: usize) -> NodeId {
    NodeId(host as u16)
}

fn contact(host: usize) -> Contact {
    Contact { address: format!("h{host}"), ..Contact::default() }
}

impl Hosts {
    /// Three hosts, each with a member of every group.
    fn new(provider: Provider, groups: usize, threads: usize) -> Self {
        let home = tempfile::tempdir().unwrap();
        let (transport, gate) = (Arc::default(), Arc::default());
        let (hosts, handles) = ((0..3).map(|_| None).collect(), vec![Vec::new(); 3]);
        let restoring = None;
        let mut all =
            Self { groups, threads, home, transport, provider, gate, restoring, hosts, handles };
        for host in 0..3 {
            for group in 0..groups {
                all.create(host, group);
            }
            all.start(host);
        }
        all
    }

    fn path(&self, host: usize, group: usize) -> std::path::PathBuf {
        self.home.path().join(format!("{host}-{group}"))
    }

    fn create(&self, host: usize, group: usize) {
        let founding = Founding {
            cluster: cluster(group),
            id: id(host),
            layout: Layout::new(64, 256).unwrap(),
            sessions: 16,
            members: (0..3).map(|host| (id(host), contact(host))).collect(),
        };
        Home::create(&self.path(host, group), &founding, Durability::Process).unwrap();
    }

    fn open_home(&self, host: usize, group: usize) -> Home {
        let boot = Boot::named("first");
        // One of a host that has just ended may still be writing a snapshot there.
        eventually("the home is free", || {
            match Home::open_under(&self.path(host, group), Durability::Process, &boot) {
                Err(error) if error.is_retryable() => None,
                opened => Some(opened.unwrap()),
            }
        })
    }

    fn config(&self) -> HostConfig {
        let transport: Arc<dyn Transport> = self.transport.clone();
        let config = HostConfig::new((self.provider)(), transport);
        HostConfig { threads: self.threads, rest: Duration::from_millis(300), ..config }
    }

    fn start(&mut self, host: usize) {
        let started = Host::start(self.config()).unwrap();
        self.transport.add_host(&format!("h{host}"), &started.entrance());
        self.handles[host].clear();
        for group in 0..self.groups {
            let restoring = self.restoring.clone().filter(|_| group == 0);
            let gate = Some(Arc::clone(&self.gate));
            let machine = Gated { gate, restoring, ..Gated::default() };
            let home = self.open_home(host, group);
            let handle = started.open(home, contact(host), machine).unwrap();
            self.handles[host].push(handle);
        }
        self.hosts[host] = Some(started);
    }

    /// The host dies, as far as others see.
    fn drop(&mut self, host: usize) {
        self.transport.remove(&format!("h{host}"));
        self.hosts[host] = None;
    }

    fn running(&self) -> impl Iterator<Item = usize> + '_ {
        (0..3).filter(|host| self.hosts[*host].is_some())
    }

    /// The host that leads a group.
    fn leader(&self, group: usize) -> Option<usize> {
        self.running().find(|host| self.handles[*host][group].status().role == RoleName::Leader)
    }

    /// The host that leads a group, once there is one.
    fn some_leader(&self, group: usize) -> usize {
        eventually("a leader", || self.leader(group))
    }

    fn append(&self, group: usize, item: u32) {
        eventually("an append", || {
            let leader = self.leader(group)?;
            match self.handles[leader][group].call(NO_SESSION, 0, append(1, item), LIMIT) {
                Ok(_) => Some(()),
                Err(Refusal::Lost | Refusal::TimedOut) => {
                    self.list(leader, group).contains(&item).then_some(())
                }
                Err(refusal) if refusal.is_retryable() => None,
                Err(refusal) => panic!("{refusal}"),
            }
        });
    }

    /// What a host has; what was appended again, because its answer was lost, is there once.
    fn list(&self, host: usize, group: usize) -> Vec<u32> {
        let answer = self.handles[host][group].read(vec![1], Consistency::Stale, LIMIT);
        let mut list = items(&answer.unwrap());
        list.dedup();
        list
    }

    fn status(&self) -> Vec<ThreadStatus> {
        self.running().flat_map(|host| self.hosts[host].as_ref().unwrap().threads()).collect()
    }

    /// Waits until every member rests.
    fn rest(&self) {
        let deadline = Instant::now() + Duration::from_secs(120);
        let rest = |status: &ThreadStatus| status.resting == status.members;
        while !self.status().iter().all(rest) {
            assert!(Instant::now() < deadline, "no rest: {:?}", self.status());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// How many groups a test runs.
fn groups(few: usize) -> usize {
    std::env::var("BEELINE_GROUPS").ok().and_then(|number| number.parse().ok()).unwrap_or(few)
}

/// Nanoseconds that all threads of hosts in this process ran, other tests' included, as the kernel counts them.
fn ran_ns() -> u64 {
    let mut ran_ns = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let path = task.unwrap().path();
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if name.starts_with("log-host-") {
            let told = std::fs::read_to_string(path.join("schedstat")).unwrap_or_default();
            let first = told.split_whitespace().next().and_then(|word| word.parse::<u64>().ok());
            ran_ns += first.unwrap_or_default();
        }
    }
    ran_ns
}

/// Idle for two seconds: how often a thread woke, how many turns it took, and what all of them cost.
fn idle(hosts: &Hosts) -> (u64, u64, f64) {
    // On a loaded machine a thread may stand still for so long that others take it for dead, or the two
    // seconds become more of them.
    for _ in 0..20 {
        hosts.rest();
        let (before, ran, begun) = (hosts.status(), ran_ns(), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        let (after, ran) = (hosts.status(), ran_ns().saturating_sub(ran));
        let most = |of: fn(&ThreadStatus) -> u64| {
            before.iter().zip(&after).map(|(before, after)| of(after) - of(before)).max().unwrap()
        };
        let rests = after.iter().all(|status| status.resting == status.members);
        let in_time = begun.elapsed() < Duration::from_millis(2500);
        if in_time && rests && most(|status| status.silences) == 0 {
            let (wakeups, turns) = (most(|status| status.wakeups), most(|status| status.turns));
            return (wakeups, turns, ran as f64 / 1e6);
        }
    }
    panic!("no two seconds of rest: {:?}", hosts.status());
}

fn rests_and_wakes(provider: Provider, groups: usize) {
    let mut hosts = Hosts::new(provider, groups, 1);
    for group in 0..groups {
        hosts.append(group, 1);
    }
    let (wakeups, turns, ran_ms) = idle(&hosts);
    println!("{groups} groups: {wakeups} wake-ups and {turns} turns in 2 s, {ran_ms:.1} ms ran");
    // Forty beats, two looks with each, and over tcp as many of others to answer, whatever the number of
    // groups: members that did not rest would take two hundred turns each.
    assert!(wakeups <= 300, "{wakeups} wake-ups of {groups} idle groups");
    assert!(turns <= 300, "{turns} turns of {groups} idle groups");
    // One group wakes; the others sleep on.
    let woken = groups / 2;
    hosts.append(woken, 2);
    for host in 0..3 {
        eventually("all three have it", || (hosts.list(host, woken) == [1, 2]).then_some(()));
    }
    hosts.rest();
    // A host is lost: what it led is led by others, and what it did not goes on.
    let lost = hosts.some_leader(0);
    hosts.drop(lost);
    for group in 0..groups {
        hosts.append(group, 3);
    }
    let (wakeups, turns, ran_ms) = idle(&hosts);
    println!("two hosts: {wakeups} wake-ups and {turns} turns in 2 s, {ran_ms:.1} ms ran");
    assert!(wakeups <= 300 && turns <= 300, "without a host: {wakeups}, {turns}");
    // It is back: its members are told of everything.
    hosts.start(lost);
    for group in 0..groups {
        let wanted: &[u32] = if group == woken { &[1, 2, 3] } else { &[1, 3] };
        eventually("it has all", || (hosts.list(lost, group) == wanted).then_some(()));
    }
}

#[test]
fn idle_groups_cost_what_one_costs_and_wake_for_proposals_and_lost_hosts_over_shm() {
    rests_and_wakes(shm, groups(40));
}

#[test]
fn idle_groups_cost_what_one_costs_and_wake_for_proposals_and_lost_hosts_over_tcp() {
    rests_and_wakes(tcp, groups(10).min(40));
}

/// The memory of a thread that hangs answers, and says that its leaders rest.
#[test]
fn groups_that_rest_are_led_by_others_when_the_thread_of_their_leader_hangs() {
    let hosts = Hosts::new(shm, 8, 1);
    for group in 0..8 {
        hosts.append(group, 1);
    }
    hosts.rest();
    let hung = hosts.some_leader(0);
    let led: Vec<_> = (0..8).filter(|group| hosts.leader(*group) == Some(hung)).collect();
    hosts.handles[hung][0].query(Vec::new(), Consistency::Stale, |_| {});
    eventually("it hangs", || hosts.gate.reached.load(Ordering::SeqCst).then_some(()));
    for group in led {
        // No command asks for it: the silence does.
        eventually("another one leads", || {
            let others = hosts.running().filter(|host| *host != hung);
            let leads =
                |host: &usize| hosts.handles[*host][group].status().role == RoleName::Leader;
            others.into_iter().find(leads)
        });
    }
    assert!(hosts.status().iter().map(|status| status.silences).sum::<u64>() > 0);
    hosts.gate.open.store(true, Ordering::SeqCst);
    for group in 0..8 {
        hosts.append(group, 2);
        eventually("it is back", || (hosts.list(hung, group) == [1, 2]).then_some(()));
    }
}

/// Reads of a leader that rested ask a majority, as every read does.
#[test]
fn a_leader_that_rests_answers_reads_and_one_that_lost_its_majority_does_not() {
    let mut hosts = Hosts::new(shm, 4, 2);
    for group in 0..4 {
        hosts.append(group, 1);
    }
    hosts.rest();
    let ask = |hosts: &Hosts, leader: usize| {
        hosts.handles[leader][0].read(vec![1], Consistency::Linearizable, Duration::from_secs(2))
    };
    // Members that wait for a processor may be taken for dead, and others lead.
    let leader = eventually("an answer", || {
        let leader = hosts.leader(0)?;
        let answer = ask(&hosts, leader).ok()?;
        assert_eq!(items(&answer).first(), Some(&1));
        Some(leader)
    });
    hosts.rest();
    for other in (0..3).filter(|host| *host != leader) {
        hosts.drop(other);
    }
    assert!(ask(&hosts, leader).is_err(), "no majority");
}

#[test]
fn a_host_may_be_dropped_on_its_own_thread_and_refuses_what_would_wait_for_itself() {
    let hosts = Hosts::new(shm, 0, 1);
    hosts.create(0, 0);
    let host = Host::start(hosts.config()).unwrap();
    let handle = host.open(hosts.open_home(0, 0), contact(0), Gated::default()).unwrap();
    let host = Arc::new(Mutex::new(Some(host)));
    let (sender, done) = channel();
    let inside = Arc::clone(&host);
    handle.query(vec![1], Consistency::Stale, move |_| {
        let host = inside.lock().unwrap().take().unwrap();
        let closed = host.close(cluster(0));
        drop(host);
        sender.send(closed).unwrap();
    });
    assert!(done.recv_timeout(LIMIT).unwrap().is_ok());
    eventually("the member is told of it", || {
        let asked = handle.read(vec![1], Consistency::Stale, LIMIT);
        (asked == Err(Refusal::Stopped)).then_some(())
    });
}

#[test]
fn a_second_member_of_a_cluster_and_greetings_for_none_are_refused_by_name() {
    let hosts = Hosts::new(shm, 1, 1);
    let host = hosts.hosts[0].as_ref().unwrap();
    let again = hosts.home.path().join("again");
    let founding = Founding {
        cluster: cluster(0),
        id: id(9),
        layout: Layout::new(64, 256).unwrap(),
        sessions: 16,
        members: vec![(id(9), contact(0))],
    };
    Home::create(&again, &founding, Durability::Process).unwrap();
    let home = Home::open_under(&again, Durability::Process, &Boot::named("first")).unwrap();
    let refused = host.open(home, contact(0), Gated::default());
    assert!(matches!(refused, Err(NodeError::Twice { .. })), "{refused:?}");
    // A member of a cluster that no other host has dials them, and is told so.
    hosts.create(0, 7);
    let handle = host.open(hosts.open_home(0, 7), contact(0), Gated::default()).unwrap();
    eventually("it is told", || {
        let status = handle.status();
        let problem = status.members.iter().find_map(|member| member.problem.clone())?;
        problem.contains("no member of cluster 00000000000003ef").then_some(())
    });
    assert!(host.is_running(cluster(7)));
    host.close(cluster(7)).unwrap();
    assert!(!host.is_running(cluster(7)));
    assert_eq!(handle.read(vec![1], Consistency::Stale, LIMIT), Err(Refusal::Stopped));
    let unreachable = hosts.transport.exchange("h7", &beeline_fabric::ConnectInfo(Vec::new()), &[]);
    assert!(matches!(unreachable, Err(TransportError::Unreachable { .. })));
}

/// One thread, and members of two groups.
#[test]
fn a_member_that_is_closed_while_it_restores_a_snapshot_does_not_hold_up_its_thread() {
    let mut all = Hosts::new(shm, 2, 1);
    all.append(0, 1);
    all.drop(2);
    (2..=200).for_each(|item| all.append(0, item));
    let gate = Arc::<Gate>::default();
    all.restoring = Some(Arc::clone(&gate));
    all.start(2);
    eventually("it restores", || gate.reached.load(Ordering::SeqCst).then_some(()));
    std::thread::scope(|scope| {
        let host = all.hosts[2].as_ref().unwrap();
        let closing = scope.spawn(|| host.close(cluster(0)));
        let soon = Duration::from_millis(200);
        eventually("it takes no more requests", || {
            let asked = all.handles[2][0].read(vec![1], Consistency::Stale, soon);
            matches!(asked, Err(Refusal::Stopped)).then_some(())
        });
        all.append(1, 1);
        eventually("the other one goes on", || (all.list(2, 1) == [1]).then_some(()));
        assert!(!closing.is_finished(), "it tells how the member ended, and it has not");
        gate.open.store(true, Ordering::SeqCst);
        closing.join().unwrap().unwrap();
    });
    // The ended member holds its folder no more.
    let boot = Boot::named("first");
    Home::open_under(&all.path(2, 0), Durability::Process, &boot).unwrap();
}
