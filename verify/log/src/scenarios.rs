//! One situation each, without chance: what the protocol promises about availability.
//!
//! The invariants are checked throughout, as in every run.

use beeline_paxos::{Change, NodeId, Options, Position, RoleName};

use crate::network::{Cpu, Happening};
use crate::world::{MS, Settings, US, World};

/// A calm cluster with endless clients, that has elected a leader; and who that is.
fn cluster(nodes: usize) -> (World, usize) {
    let settings = Settings { calm: true, operations: 1_000_000, ..Settings::new(nodes, 11) };
    let mut world = World::new(settings).unwrap();
    world.pass(300 * MS).unwrap();
    for _ in 0..200 {
        let reaches_all = |leader: &usize| {
            let replica = world.servers[*leader].replica.as_ref().unwrap();
            let reached = |node| replica.confirmed_by(NodeId(node as u16)).is_some();
            others(&world, *leader).into_iter().all(reached)
        };
        if let Some(leader) = world.leader().filter(reaches_all) {
            return (world, leader);
        }
        world.pass(5 * MS).unwrap();
    }
    panic!("a calm cluster elects a leader, and the leader reaches everybody");
}

fn committed(world: &World, node: usize) -> Position {
    world.servers[node].replica.as_ref().map_or(Position::NONE, |replica| replica.committed())
}

fn role(world: &World, node: usize) -> Option<RoleName> {
    world.servers[node].replica.as_ref().map(|replica| replica.role())
}

fn others(world: &World, leader: usize) -> Vec<usize> {
    (0..world.settings.nodes).filter(|node| *node != leader).collect()
}

#[test]
fn commits_need_followers_memories_and_not_their_processors() {
    for nodes in [3, 5, 7] {
        let (mut world, leader) = cluster(nodes);
        let followers = others(&world, leader);
        // f are dead, and the f that are left stand still: their memories alone make f + 1.
        let f = nodes / 2;
        for node in &followers[..f] {
            world.crash(*node, true).unwrap();
        }
        for node in &followers[f..] {
            world.pause(*node);
        }
        let before = committed(&world, leader);
        // Clients find the leader among servers that do not answer.
        world.pass(1_000 * MS).unwrap();
        // Until a ring is full: nobody takes snapshots over there.
        let snapshots = followers[f..].iter().map(|node| world.servers[*node].snapshot.position);
        let full = snapshots.min().unwrap().plus(32);
        let (now, agreed) = (committed(&world, leader), committed(&world, leader).since(before));
        assert!(agreed > 0 || now >= full, "{nodes} servers agreed on {agreed} entries");
        assert_eq!(role(&world, leader), Some(RoleName::Leader));
    }
}

#[test]
fn without_f_plus_one_memories_nothing_is_committed_and_nothing_is_lost() {
    for nodes in [3, 5, 7] {
        let (mut world, leader) = cluster(nodes);
        let followers = others(&world, leader);
        let down = &followers[..nodes / 2 + 1];
        for node in down {
            world.crash(*node, true).unwrap();
        }
        world.pass(MS).unwrap();
        let before = committed(&world, leader);
        world.pass(1_000 * MS).unwrap();
        assert_eq!(committed(&world, leader), before, "{nodes} servers");
        assert_eq!(world.leader(), None, "a leader without a majority steps down");
        for node in down {
            world.restart(*node).unwrap();
        }
        world.pass(500 * MS).unwrap();
        let leader = world.leader().expect("service comes back");
        assert!(committed(&world, leader) > before);
    }
}

#[test]
fn a_leader_that_hangs_is_replaced_and_finds_its_writes_refused_when_it_wakes() {
    let (mut world, old) = cluster(3);
    for server in &mut world.servers {
        // Copies stop with the processor, as on shared memory.
        server.stalls = true;
    }
    let term = world.servers[old].replica.as_ref().unwrap().term();
    while !world.is_writing(old) {
        world.pass(US).unwrap();
    }
    world.pause(old);
    // Patience, and time for two campaigns at once and one more.
    world.pass(700 * MS).unwrap();
    let new = others(&world, old)
        .into_iter()
        .find(|node| role(&world, *node) == Some(RoleName::Leader))
        .expect("the others elect a leader");
    assert!(world.servers[new].replica.as_ref().unwrap().term() > term);
    let refused = world.report.refused;
    let before = committed(&world, new);
    world.resume(old).unwrap();
    world.pass(300 * MS).unwrap();
    assert!(world.report.refused > refused, "it was in the middle of something");
    assert_eq!(role(&world, old), Some(RoleName::Follower));
    assert!(committed(&world, new) > before);
    assert!(committed(&world, old) > before, "it follows");
}

/// How long the others go without a leader when the old one stands still and its memory answers,
/// as on shared memory: milliseconds, shortest first.
fn replacements(trials: u64, late_ns: u64) -> Vec<u64> {
    let replaced = |seed: u64| {
        let settings = Settings {
            calm: true,
            operations: 1_000_000,
            options: Options::default(),
            late_ns,
            ..Settings::new(if seed.is_multiple_of(3) { 5 } else { 3 }, seed)
        };
        let mut world = World::new(settings).unwrap();
        for server in &mut world.servers {
            server.rate = 1000;
        }
        let mut waited = 0;
        while world.leader().is_none() {
            world.pass(100 * MS).unwrap();
            waited += 1;
            assert!(waited < 100, "seed {seed}: no leader at the start");
        }
        // Stopped at any moment between two beats.
        world.pass(1_000 * MS + seed * 7_919_000 % (200 * MS)).unwrap();
        let old = world.leader().expect("nothing went wrong");
        world.pause(old);
        let from_ns = world.now_ns;
        let is_led = |world: &World| {
            let mut others = others(world, old).into_iter();
            others.any(|node| role(world, node) == Some(RoleName::Leader))
        };
        while !is_led(&world) {
            world.pass(MS).unwrap();
            assert!(world.now_ns - from_ns < 20_000 * MS, "seed {seed}: nobody leads");
        }
        (world.now_ns - from_ns) / MS
    };
    let mut all: Vec<_> = (0..trials).map(replaced).collect();
    all.sort_unstable();
    all
}

#[test]
fn a_leader_that_stands_still_while_its_memory_answers_is_replaced_within_a_second() {
    // Ticks on time, and ticks of a machine that is busy.
    for late_ns in [MS, 60 * MS] {
        let all = replacements(50, late_ns);
        let (half, longest) = (all[all.len() / 2], all[all.len() - 1]);
        assert!(half < 400 && longest < 1_000, "p50 {half} ms, longest {longest} ms: {all:?}");
    }
}

#[test]
fn a_leader_that_is_cut_off_steps_down_and_the_others_go_on() {
    let (mut world, old) = cluster(5);
    for node in others(&world, old) {
        world.network.cut.insert((old, node));
        world.network.cut.insert((node, old));
    }
    world.pass(500 * MS).unwrap();
    assert_ne!(role(&world, old), Some(RoleName::Leader));
    let before = committed(&world, old);
    let new = world.leader().expect("four of five elect");
    world.pass(100 * MS).unwrap();
    assert!(committed(&world, new) > before);
    let term = world.servers[new].replica.as_ref().unwrap().term();
    for node in others(&world, old) {
        world.happen(Happening::Mend { link: (old, node) }).unwrap();
        world.happen(Happening::Mend { link: (node, old) }).unwrap();
    }
    world.pass(300 * MS).unwrap();
    assert_eq!(world.leader(), Some(new), "its return unseats nobody");
    assert_eq!(world.servers[new].replica.as_ref().unwrap().term(), term);
    assert!(committed(&world, old) > before);
}

#[test]
fn a_follower_that_is_cut_off_comes_back_and_unseats_nobody() {
    let (mut world, leader) = cluster(3);
    let follower = others(&world, leader)[0];
    let term = |world: &World, node: usize| world.servers[node].replica.as_ref().unwrap().term();
    let before = term(&world, leader);
    for away_ms in [50, 300, 2_000] {
        for node in others(&world, follower) {
            world.network.cut.insert((follower, node));
            world.network.cut.insert((node, follower));
        }
        world.pass(away_ms * MS).unwrap();
        assert_eq!(term(&world, follower), before, "it asks before it raises a term");
        for node in others(&world, follower) {
            world.happen(Happening::Mend { link: (follower, node) }).unwrap();
            world.happen(Happening::Mend { link: (node, follower) }).unwrap();
        }
        world.pass(300 * MS).unwrap();
        assert_eq!((world.leader(), term(&world, leader)), (Some(leader), before));
        let (has, all) = (committed(&world, follower), committed(&world, leader));
        assert!(all.since(has) < 64, "{has} of {all}");
    }
}

#[test]
fn leadership_moves_when_asked_to() {
    let (mut world, old) = cluster(3);
    for to in others(&world, old) {
        let leader = world.leader().unwrap();
        let moves = world.report.leaderships;
        world.cpu_after(0, leader, Cpu::Transfer { to: NodeId(to as u16) });
        world.pass(60 * MS).unwrap();
        assert_eq!(world.leader(), Some(to), "sooner than any patience ends");
        assert_eq!(world.report.leaderships, moves + 1);
    }
}

#[test]
fn members_join_and_leave_under_load_the_leader_too() {
    let (mut world, leader) = cluster(3);
    let joiner = 3;
    let change = |world: &mut World, change| {
        let leader = world.leader().expect("somebody leads");
        world.cpu_after(0, leader, Cpu::Change(change));
        world.pass(400 * MS).unwrap();
    };
    change(&mut world, Change::Join(NodeId(joiner as u16)));
    let members = |world: &World, node: usize| {
        world.servers[node].replica.as_ref().unwrap().configuration().members().len()
    };
    assert_eq!(members(&world, joiner), 4, "the new member knows that it is one");
    assert!(committed(&world, joiner).since(committed(&world, leader)) < 64);
    change(&mut world, Change::Leave(NodeId(leader as u16)));
    let new = world.leader().expect("the others elect");
    assert_ne!(new, leader);
    assert_eq!(members(&world, new), 3);
    let before = committed(&world, new);
    world.pass(100 * MS).unwrap();
    assert!(committed(&world, new) > before);
    // The one that left disturbs nobody.
    assert_eq!(world.leader(), Some(new));
}

#[test]
fn a_joiner_counts_for_nothing_until_it_has_the_data() {
    let (mut world, leader) = cluster(3);
    let (joiner, id) = (3, NodeId(3));
    let members = |world: &World| {
        let leader = world.leader().expect("a majority of the members is there");
        world.servers[leader].replica.as_ref().unwrap().configuration().members().len()
    };
    // It is not there at all, and one of three members is not either.
    world.crash(joiner, false).unwrap();
    world.cpu_after(0, leader, Cpu::Change(Change::Join(id)));
    world.pass(100 * MS).unwrap();
    let away = others(&world, leader)[0];
    world.crash(away, false).unwrap();
    let before = committed(&world, leader);
    world.pass(500 * MS).unwrap();
    assert!(committed(&world, leader) > before, "two of three go on");
    assert_eq!(members(&world), 3);
    // It comes, is brought up to date, and is a member then.
    world.restart(joiner).unwrap();
    world.pass(500 * MS).unwrap();
    assert_eq!(members(&world), 4);
    let leader = world.leader().unwrap();
    let (has, all) = (committed(&world, joiner), committed(&world, leader));
    assert!(all.since(has) < 64, "{has} of {all}");
    // One that is given up is not replicated to any more.
    world.cpu_after(0, leader, Cpu::Change(Change::Leave(id)));
    world.pass(200 * MS).unwrap();
    world.crash(joiner, false).unwrap();
    for change in [Change::Join(id), Change::Leave(id)] {
        let leader = world.leader().unwrap();
        world.cpu_after(0, leader, Cpu::Change(change));
        world.pass(50 * MS).unwrap();
    }
    world.restart(joiner).unwrap();
    world.pass(300 * MS).unwrap();
    assert_eq!(members(&world), 3);
}

#[test]
fn a_cluster_that_loses_all_power_again_and_again_keeps_what_it_said() {
    let settings = Settings { calm: true, operations: 150, ..Settings::new(5, 5) };
    let mut world = World::new(settings).unwrap();
    for _ in 0..6 {
        world.pass(220 * MS).unwrap();
        for node in 0..world.servers.len() {
            world.crash(node, true).unwrap();
        }
        for node in 0..world.servers.len() {
            world.restart(node).unwrap();
        }
    }
    for _ in 0..200 {
        world.pass(50 * MS).unwrap();
        if world.is_at_rest() {
            break;
        }
    }
    assert!(world.is_at_rest());
    world.finish().unwrap();
    assert!(world.report.leaderships >= 6 && world.report.answered >= 600);
}
