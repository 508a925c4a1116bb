//! Real processes, killed, stopped in bad places, cut off, and short of disk, under clients whose
//! histories are checked.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod real;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_env::Randomness;

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
    while Instant::now() < end {
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
    assert!(kills > 2 && leaders > 0, "{kills} kills, {leaders} of leaders");
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
    let leader = cluster.leader();
    cluster.append(&[leader], 0, 1, 0);
    cluster.converge(&ALL);
    for follower in others(leader) {
        cluster.stop(follower);
    }
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
    for _ in 0..if deep() { 20 } else { 2 } {
        let old = cluster.leader();
        cluster.stop(old);
        cluster.leader_of(&others(old));
        clients.go_on(20);
        cluster.go_on(old);
        eventually("the old leader follows", || cluster.follows(old));
    }
    clients.check(|| cluster.converge(&ALL));
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
        assert_eq!(cluster.number(away, "installed"), 1);
    }
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
