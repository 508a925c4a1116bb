//! Real processes, killed, stopped in bad places, cut off, and short of disk, under clients whose
//! histories are checked.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod real;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_env::Randomness;
use beeline_fabric::ConnectInfo;
use beeline_replicated_log::{Transport as _, TransportError};
use beeline_verify_log::bootstrap::ToMembers;

use real::{Clients, Cluster, Known, Shape, deep, eventually, note};

const ALL: [usize; 3] = [1, 2, 3];

fn known(cluster: &Cluster) -> Known {
    Arc::new(Mutex::new(cluster.clients.clone()))
}

fn others(node: usize) -> Vec<usize> {
    ALL.into_iter().filter(|other| *other != node).collect()
}

fn killed_again_and_again(provider: &'static str, seed: u64) {
    let mut cluster = Cluster::new(Shape::new(provider), 3, 3);
    let mut random = Randomness::new(seed);
    let clients = Clients::start(&known(&cluster), 4);
    clients.go_on(20);
    let end = Instant::now() + Duration::from_secs(if deep() { 90 } else { 5 });
    let (mut kills, mut leaders) = (0, 0);
    // However slow the machine: some kills, one of a leader among them.
    while Instant::now() < end || kills < 3 || leaders == 0 {
        let leader = cluster.leader();
        let node = if random.chance(1, 2) { leader } else { 1 + random.below(3) as usize };
        std::thread::sleep(Duration::from_millis(random.below(120)));
        cluster.kill(node);
        kills += 1;
        leaders += u32::from(node == leader);
        if random.chance(2, 3) {
            // The others go on meanwhile.
            clients.go_on(5);
        }
        cluster.start(node);
        if random.chance(1, 3) {
            clients.go_on(5);
        }
    }
    let answered = clients.check(|| cluster.converge(&ALL));
    note(&format!("{kills} kills over {provider}, {leaders} of leaders, {answered} operations"));
}

#[test]
fn members_are_killed_again_and_again_over_shm() {
    killed_again_and_again("shm", 1);
}

#[test]
fn members_are_killed_again_and_again_over_tcp() {
    killed_again_and_again("tcp", 2);
}

#[test]
fn commits_go_on_over_shm_while_both_followers_are_stopped() {
    let cluster = Cluster::new(Shape::new("shm"), 3, 3);
    cluster.append(&ALL, 0, 1, 0);
    cluster.converge(&ALL);
    // On a loaded machine another one may have come to lead meanwhile.
    let leader = eventually("followers that are stopped", || {
        let leader = cluster.leader();
        others(leader).into_iter().for_each(|follower| cluster.stop(follower));
        if cluster.field(leader, "role").as_deref() == Some("Leader") {
            return Some(leader);
        }
        others(leader).into_iter().for_each(|follower| cluster.go_on(follower));
        None
    });
    let term = cluster.number(leader, "term");
    for item in 2..=100 {
        cluster.append(&[leader], 0, item, 0);
    }
    assert!(others(leader).into_iter().all(|follower| cluster.is_stopped(follower)));
    assert_eq!(cluster.number(leader, "term"), term, "nobody was elected meanwhile");
    for follower in others(leader) {
        cluster.go_on(follower);
    }
    assert_eq!(cluster.converge(&ALL)[0], (1..=100).collect::<Vec<_>>());
}

fn a_stopped_leader_is_replaced(provider: &'static str) {
    let cluster = Cluster::new(Shape::new(provider), 3, 3);
    let clients = Clients::start(&known(&cluster), 4);
    clients.go_on(20);
    let mut longest = Duration::ZERO;
    for _ in 0..if deep() { 50 } else { 6 } {
        let old = cluster.leader();
        let stopped = Instant::now();
        cluster.stop(old);
        cluster.leader_of(&others(old));
        longest = longest.max(stopped.elapsed());
        clients.go_on(20);
        cluster.go_on(old);
        eventually("the old leader follows", || cluster.follows(old));
    }
    clients.check(|| cluster.converge(&ALL));
    // How soon is judged where time is simulated, in the scenario of a leader that stands still while
    // its memory answers (`scenarios.rs`), and measured by `beeline bench log`.
    note(&format!("a stopped leader over {provider}: replaced after {longest:?} at the longest"));
}

#[test]
fn a_stopped_leader_is_replaced_and_harmless_when_it_wakes_over_shm() {
    a_stopped_leader_is_replaced("shm");
}

#[test]
fn a_stopped_leader_is_replaced_and_harmless_when_it_wakes_over_tcp() {
    a_stopped_leader_is_replaced("tcp");
}

#[test]
fn a_leader_stopped_inside_a_copy_alters_no_log_when_it_wakes() {
    let shape = Shape { slots: 64, slot_bytes: 16384, ..Shape::new("shm") };
    let cluster = Cluster::new(shape, 3, 3);
    let old = cluster.leader();
    cluster.append(&[old], 0, 1, 12_000);
    cluster.converge(&ALL);
    let trap = cluster.ask(old, &format!("trap {}", others(old)[0])).unwrap();
    assert!(trap.starts_with("ok"), "{trap}");
    // The next entry springs it: the leader stops in the middle of its copy.
    let mut line = real::Line::open(cluster.clients[old - 1], Duration::from_millis(300));
    let lost = format!("append {} 0 0 2 12000", u64::MAX);
    assert_eq!(line.as_mut().and_then(|line| line.ask(&lost)), None);
    eventually("it stopped itself inside the copy", || cluster.is_stopped(old).then_some(()));
    cluster.leader_of(&others(old));
    // Other values for the positions that the old leader was writing.
    for item in 10..20 {
        cluster.append(&others(old), 0, item, 12_000);
    }
    let before = cluster.converge(&others(old));
    cluster.go_on(old);
    eventually("the old leader finished its copy, and follows", || cluster.follows(old));
    assert_eq!(cluster.ask(old, "trapped").as_deref(), Some("ok 1"));
    let after = cluster.converge(&ALL);
    // The value that was under way may have been kept by the election, in its place and whole.
    assert_eq!(after, before);
    let tail: Vec<_> = after[0].iter().copied().filter(|item| *item >= 10).collect();
    assert_eq!(tail, (10..20).collect::<Vec<_>>());
    // What lies in the logs of the others is what was chosen: restarted, they agree on it.
    let mut cluster = cluster;
    for node in ALL {
        cluster.kill(node);
    }
    for node in ALL {
        cluster.start(node);
    }
    cluster.leader();
    assert_eq!(cluster.converge(&ALL), after);
}

#[test]
fn a_leader_stopped_inside_a_copy_counts_nothing_in_memory_that_its_owner_left() {
    let shape = Shape { slots: 64, slot_bytes: 16384, ..Shape::new("shm") };
    let mut cluster = Cluster::new(shape, 3, 3);
    let old = cluster.leader();
    cluster.append(&[old], 0, 1, 12_000);
    cluster.converge(&ALL);
    // The second follower has nothing of the next entry.
    let (follower, away) = (others(old)[0], others(old)[1]);
    cluster.kill(away);
    eventually("the leader reaches one follower", || {
        (cluster.number(old, "reached") == 2).then_some(())
    });
    let trap = cluster.ask(old, &format!("trap {follower}")).unwrap();
    assert!(trap.starts_with("ok"), "{trap}");
    let address = cluster.clients[old - 1];
    let asking = std::thread::spawn(move || {
        let mut line = real::Line::open(address, Duration::from_secs(60)).unwrap();
        line.ask(&format!("append {} 0 0 2 12000", u64::MAX))
    });
    eventually("it stopped itself inside the copy", || cluster.is_stopped(old).then_some(()));
    // The owner of the memory that it copies into dies and comes back, with another backing.
    cluster.kill(follower);
    cluster.start(follower);
    cluster.start(away);
    cluster.leader_of(&others(old));
    for item in 10..20 {
        cluster.append(&others(old), 0, item, 12_000);
    }
    let before = cluster.converge(&others(old));
    cluster.go_on(old);
    eventually("the old leader finished its copy, and follows", || cluster.follows(old));
    assert_eq!(cluster.ask(old, "trapped").as_deref(), Some("ok 1"));
    let answer = asking.join().unwrap();
    let acknowledged = answer.as_deref().is_some_and(|answer| answer.starts_with("ok"));
    let kept = before[0].contains(&2);
    assert!(!acknowledged || kept, "{answer:?} for what the others did not choose: {before:?}");
    assert_eq!(cluster.converge(&ALL), before);
}

fn all_are_killed_at_once(provider: &'static str, power: bool) {
    let mut cluster = Cluster::new(Shape { power, ..Shape::new(provider) }, 3, 3);
    let clients = Clients::start(&known(&cluster), 4);
    for _ in 0..if deep() { 20 } else { 2 } {
        clients.go_on(20);
        for node in ALL {
            cluster.kill(node);
        }
        for node in ALL {
            cluster.start(node);
        }
    }
    clients.go_on(20);
    clients.check(|| cluster.converge(&ALL));
}

#[test]
fn every_acknowledged_command_is_there_after_all_were_killed_over_shm() {
    all_are_killed_at_once("shm", false);
}

#[test]
fn every_acknowledged_command_is_there_after_all_were_killed_over_tcp() {
    all_are_killed_at_once("tcp", false);
}

#[test]
fn every_acknowledged_command_is_there_after_all_were_killed_at_level_power() {
    all_are_killed_at_once("shm", true);
}

#[test]
fn a_member_that_missed_more_than_the_ring_gets_a_snapshot() {
    for provider in ["shm", "tcp"] {
        let mut cluster = Cluster::new(Shape::new(provider), 3, 3);
        let leader = cluster.leader();
        let away = others(leader)[0];
        cluster.append(&ALL, 0, 1, 0);
        cluster.converge(&ALL);
        cluster.kill(away);
        for item in 2..=600 {
            cluster.append(&others(away), 0, item, 1000);
        }
        cluster.start(away);
        assert_eq!(cluster.converge(&ALL)[0].len(), 600);
        // The leader's, and on a busy machine perhaps one more, of a voter whose log it lacked.
        assert!(cluster.number(away, "installed") > 0);
    }
}

#[test]
fn a_member_whose_disk_was_replaced_is_refused_until_it_was_removed_and_added() {
    let mut cluster = Cluster::new(Shape::new("shm"), 3, 3);
    let leader = cluster.leader();
    cluster.append(&ALL, 0, 1, 0);
    cluster.converge(&ALL);
    let (replaced, away) = (others(leader)[0], others(leader)[1]);
    cluster.kill(away);
    // The leader and the member whose disk is lost are the majority that has this.
    cluster.append(&[leader, replaced], 0, 2, 0);
    cluster.kill(leader);
    cluster.kill(replaced);
    cluster.wipe(replaced);
    cluster.start(away);
    cluster.start(replaced);
    eventually("the member that remembers says why", || {
        let problems = cluster.field(away, "problems")?;
        problems.contains("its_disk_was_replaced").then_some(())
    });
    // Several times the longest election.
    std::thread::sleep(Duration::from_secs(2));
    for node in [away, replaced] {
        assert_ne!(cluster.field(node, "role").as_deref(), Some("Leader"), "member {node}");
    }
    cluster.start(leader);
    let now = cluster.leader_of(&[leader, away]);
    assert_eq!(cluster.converge(&[leader, away])[0], [1, 2]);
    let order = |cluster: &Cluster, line: &str| {
        eventually("the leader does it", || {
            let answer = cluster.ask(cluster.leader_of(&[leader, away]), line)?;
            answer.starts_with("ok").then_some(())
        });
    };
    assert!(cluster.field(now, "problems").is_some_and(|problems| problems.contains("replaced")));
    order(&cluster, &format!("leave {replaced}"));
    cluster.kill(replaced);
    cluster.wipe(replaced);
    cluster.start_joining(replaced);
    order(&cluster, &format!("join {replaced} {}", cluster.log_address(replaced)));
    assert_eq!(cluster.converge(&ALL)[0], [1, 2]);
}

#[test]
fn members_join_and_leave_under_load() {
    let mut cluster = Cluster::new(Shape::new("shm"), 3, 5);
    let members: Known = Arc::new(Mutex::new(cluster.clients[..3].to_vec()));
    let clients = Clients::start(&members, 4);
    clients.go_on(20);
    let of_leader = |cluster: &Cluster, line: &str| {
        eventually("the leader does it", || {
            let answer = cluster.ask(cluster.leader(), line)?;
            assert!(!answer.starts_with("fail"), "{line}: {answer}");
            answer.starts_with("ok").then_some(())
        });
    };
    for joiner in [4, 5] {
        cluster.start(joiner);
        of_leader(&cluster, &format!("join {joiner} {}", cluster.log_address(joiner)));
        clients.go_on(20);
    }
    members.lock().unwrap().clone_from(&cluster.clients);
    // Two of five are gone, the leader among them, and clients go on.
    let leader = cluster.leader();
    let second = if leader == 1 { 2 } else { 1 };
    for node in [leader, second] {
        cluster.kill(node);
    }
    clients.go_on(20);
    for node in [leader, second] {
        cluster.start(node);
    }
    of_leader(&cluster, "leave 1");
    of_leader(&cluster, "leave 2");
    cluster.kill(1);
    cluster.kill(2);
    clients.go_on(20);
    clients.check(|| cluster.converge(&[3, 4, 5]));
    assert_eq!(cluster.field(cluster.leader(), "members").as_deref(), Some("3,4,5"));
}

/// As a member's greeting, for member 1 of the cluster under test.
struct Greeting {
    version: u8,
    cluster: u64,
    from: u16,
    to: u16,
    instance: u64,
    age: (u64, u64),
    slots: u64,
}

impl Greeting {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"BLH".to_vec();
        bytes.push(self.version);
        bytes.extend_from_slice(&self.cluster.to_le_bytes());
        bytes.extend_from_slice(&self.from.to_le_bytes());
        bytes.extend_from_slice(&self.to.to_le_bytes());
        for word in [0, self.instance, self.age.0, self.age.1, self.slots, 2048, 0] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        // No contact, no host and no line.
        bytes.extend_from_slice(&[0; 2 + 16 + 8 + 2]);
        bytes
    }
}

#[test]
fn strangers_other_versions_and_recorded_greetings_are_refused_in_words_and_disturb_nobody() {
    let cluster = Cluster::new(Shape::new("tcp"), 3, 3);
    cluster.append(&ALL, 0, 1, 0);
    cluster.converge(&ALL);
    let leader = cluster.leader();
    let term = cluster.number(leader, "term");
    // Where a member's number is kept says which instance of it there is.
    let identity = std::fs::read(cluster.folder(2).join("identity")).unwrap();
    let instance = u64::from_le_bytes(identity[24..32].try_into().unwrap());
    let sound = || Greeting {
        version: beeline_replicated_log::hello::VERSION,
        cluster: 77,
        from: 2,
        to: 1,
        instance,
        age: (1, 1),
        slots: 256,
    };
    let transport = ToMembers::new("tcp");
    let refused = |bytes: &[u8]| {
        let answer = transport.exchange(cluster.log_address(1), &ConnectInfo(Vec::new()), bytes);
        match answer {
            Err(TransportError::Refused { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    };
    for (greeting, expected) in [
        (Greeting { version: 9, ..sound() }, "version 9"),
        (Greeting { cluster: 78, ..sound() }, "belongs to cluster"),
        (Greeting { to: 3, ..sound() }, "looks for"),
        (Greeting { slots: 512, ..sound() }, "another shape"),
        (Greeting { instance: instance ^ 1, ..sound() }, "is taken"),
        // What member 2 said when it connected, or something like it, once more.
        (sound(), "an old one"),
    ] {
        for _ in 0..3 {
            let reason = refused(&greeting.bytes());
            assert!(reason.contains(expected), "{expected}: {reason}");
        }
    }
    for bytes in [&b""[..], b"BLH", b"GET / HTTP/1.1", &sound().bytes()[..40]] {
        assert!(refused(bytes).contains("not that of a replicated log"), "{bytes:?}");
    }
    cluster.append(&[leader], 0, 2, 0);
    assert_eq!(cluster.converge(&ALL)[0], [1, 2]);
    assert_eq!((cluster.leader(), cluster.number(leader, "term")), (leader, term));
}
