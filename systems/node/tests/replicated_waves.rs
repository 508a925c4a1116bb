//! Units that are applied at the same time answer and do what they would one after another.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use beeline_node::{Node, NodeConfig};
use beeline_replicated_log::{Position, StateMachine as _};
use common::replicas::{Cluster, Member, ask, cluster, on_disk, options, with_commits};
use common::units::{Chance, assert_reply, run, script};
use common::{Client, PATIENCE, config};

/// Runs of any length, at members of other numbers of shards than the one that applies unit by unit: replies and
/// the last look are the same, and what members compare ([`Member`]'s end looks at that).
#[test]
fn units_at_the_same_time_do_what_they_do_one_after_another() {
    const UNITS: u64 = 700;
    let (started, handed) = (Instant::now(), AtomicU64::new(0));
    // Whether a shard's thread takes a part before the log's thread takes it back is up to chance.
    let seeds = (1..).take_while(|seed| {
        assert!(started.elapsed() < PATIENCE, "the shards' threads have no part in it");
        *seed <= 6 || handed.load(Ordering::Relaxed) == 0
    });
    for seed in seeds {
        let mut chance = Chance::new(seed);
        let mut told = None;
        drop(Member::start_with(&Arc::default(), 1, config(1), |machine| {
            told = Some(script(&mut chance, UNITS, machine));
        }));
        let told = told.unwrap();
        for shards in [1, 2, 5] {
            let cluster = with_commits(seed % 2 == 0);
            let member = Member::start_with(&cluster, 2, config(shards), |machine| {
                let mut from = 0;
                while from < told.units.len() {
                    let longest = if chance.below(4) == 0 { 150 } else { 12 };
                    let to = (from + chance.within(1..=longest) as usize).min(told.units.len());
                    let replies = run(machine, &told, (from, to)).unwrap();
                    for (at, reply) in (from..to).zip(replies) {
                        let run =
                            format!("seed {seed}, {shards} shards, a run from {from} to {to}");
                        assert_reply(&told, at, &reply, &run);
                    }
                    from = to;
                }
            });
            let lines = member.node.as_ref().unwrap().handle().stats().replication.unwrap().1;
            assert!(lines.units > UNITS / 2, "{lines:?}");
            let mut client = member.client();
            let (waves, parts) =
                (figure(&mut client, "log_waves"), figure(&mut client, "log_parts"));
            let several = shards == 1 || parts > waves;
            assert!(waves > UNITS / 20 && several, "{shards} shards: {waves} waves, {parts} parts");
            handed.fetch_add(handed_over(&member), Ordering::Relaxed);
        }
    }
}

fn figure(client: &mut Client, name: &str) -> u64 {
    client.send("INFO replication\r\n");
    let text = client.reply();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
    line.unwrap().trim().parse().unwrap()
}

/// Pipelines fill units, and their shards' threads take a share. Meanwhile a client that reads two keys that one request
/// changes together, or of which one is changed before the other, sees the log at some position.
#[test]
fn shards_threads_take_part_and_no_read_over_several_shards_sees_them_apart() {
    const ROUNDS: usize = 150;
    const KEYS: usize = 64;
    let (_cluster, members) = cluster(2);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = members
            .iter()
            .flat_map(|member| [(member, false), (member, true)])
            .map(|(member, stale)| {
                let (mut client, stop) = (member.client(), &stop);
                scope.spawn(move || {
                    if stale {
                        ask(&mut client, "READONLY", "+OK\r\n");
                    }
                    let all: String = (0..KEYS).map(|key| format!(" k{key}")).collect();
                    let mut seen = 0_u64;
                    while !stop.load(Ordering::Relaxed) {
                        client.send(&format!("MGET{all}\r\n"));
                        assert_eq!(client.line(), format!("*{KEYS}"));
                        let values: Vec<u64> = (0..KEYS)
                            .map(|_| {
                                let length = client.line();
                                if length == "$-1" { 0 } else { client.line().parse().unwrap() }
                            })
                            .collect();
                        // Each round sets the keys in order, one after another.
                        assert!(
                            values.windows(2).all(|two| two[0] == two[1] || two[0] == two[1] + 1),
                            "{values:?}"
                        );
                        assert!(values[0] - values[KEYS - 1] <= 1, "{values:?}");
                        seen += 1;
                    }
                    seen
                })
            })
            .collect();
        let mut writer = members[0].client();
        let started = Instant::now();
        let mut round = 0;
        while round < ROUNDS || members.iter().all(|member| handed_over(member) == 0) {
            assert!(started.elapsed() < PATIENCE, "the shards' threads have no part in it");
            round += 1;
            let requests: String = (0..KEYS).map(|key| format!("SET k{key} {round}\r\n")).collect();
            writer.send(&requests);
            writer.expect(&"+OK\r\n".repeat(KEYS));
        }
        stop.store(true, Ordering::Relaxed);
        let seen: Vec<_> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
        assert!(seen.iter().all(|seen| *seen > 0), "{seen:?}");
    });
    for member in &members {
        let mut client = member.client();
        let (waves, parts) = (figure(&mut client, "log_waves"), figure(&mut client, "log_parts"));
        assert!(waves > 0 && parts > waves, "{waves} waves of {parts} parts");
    }
}

/// A client that reads several shards waits for what is being applied, and not for the end of the run, which may be
/// the whole ring; a file of the keys needs the position recorded.
#[test]
fn who_reads_several_shards_waits_for_a_wave_and_a_saver_for_the_run() {
    let mut chance = Chance::new(9);
    let mut told = None;
    drop(Member::start_with(&Arc::default(), 1, config(1), |machine| {
        told = Some(script(&mut chance, 40, machine));
    }));
    let told = told.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let replication = Some(options(&Cluster::default(), 2));
    let node = Node::start(&NodeConfig { replication, ..on_disk(directory.path()) }).unwrap();
    let mut machine = node.machine(Vec::new()).unwrap();
    let [mut reader, mut saver] = [Client::connect(&node), Client::connect(&node)];
    ask(&mut reader, "READONLY", "+OK\r\n");
    let (mut reply, mut replies) = (Vec::new(), Vec::new());
    for (position, unit) in (1..).zip(&told.units[..20]) {
        machine.take(Position(position), unit, &mut reply);
        machine.settle(&mut replies);
    }
    let all: String = (0..12).map(|key| format!(" key{key}")).collect();
    reader.send(&format!("MGET{all}\r\n"));
    assert_eq!(reader.line(), "*12", "a reader waits for more than a wave");
    let saved = directory.path().join("snapshot.bee");
    std::thread::scope(|scope| {
        let saving = scope.spawn(|| saver.ask("SAVE"));
        // Its shard's thread waits; the other one answers.
        for _ in 0..50 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert!(!saving.is_finished() && !saved.exists(), "its file has no position");
        }
        machine.flush(Position(20)).unwrap();
        assert_eq!(saving.join().unwrap(), "+OK");
    });
    drop(machine);
    node.stop();
}

fn handed_over(member: &Member) -> u64 {
    figure(&mut member.client(), "log_parts_handed_over")
}
