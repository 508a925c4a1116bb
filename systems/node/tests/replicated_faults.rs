//! Replicated nodes over a log in memory: units that cannot be applied, clocks that were set back,
//! snapshots that come or go while clients read and write.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_node::{Node, NodeConfig};
use beeline_pmem::PoolOptions;
use beeline_replicated_log::{Position, StateMachine as _};
use beeline_replicated_service::{LaneName, Machine, Tag, Turn, unit};
use common::replicas::{Cluster, Member, ask, cluster, on_disk, options};
use common::{Client, PATIENCE, config};

#[test]
fn a_member_that_cannot_apply_a_unit_answers_so_on_every_shard_and_the_others_go_on() {
    let cluster = Arc::new(Cluster::default());
    let mut members: Vec<_> = (1..=2).map(|id| Member::start(&cluster, id, config(2))).collect();
    // The third one has less room than the others.
    let roomy = config(2);
    let pool = PoolOptions { capacity_bytes: 32 << 20, ..roomy.pool.clone() };
    members.push(Member::start(&cluster, 3, NodeConfig { pool, ..roomy }));
    cluster.lead(Some(1));
    let mut writer = members[0].client();
    // Connections are dealt in turn: one for each shard.
    let mut refused = [members[2].client(), members[2].client()];
    for client in &mut refused {
        ask(client, "SET before value", "+OK\r\n");
    }
    let value = "v".repeat(48 << 10);
    for key in 0..1200 {
        ask(&mut writer, &format!("SET key{key} {value}"), "+OK\r\n");
    }
    let started = Instant::now();
    for client in &mut refused {
        for request in ["SET before other", "GET before", "MGET before key1 key2 key3"] {
            let mut reply = client.ask(request);
            while !reply.starts_with("-MISCONF") {
                assert!(started.elapsed() < PATIENCE, "{request}: {reply}");
                std::thread::sleep(Duration::from_millis(10));
                reply = client.ask(request);
            }
        }
        assert_eq!(client.ask("PING"), "+PONG");
    }
    ask(&mut writer, "GET before", "$5\r\nvalue\r\n");
}

/// An earlier run may have left shards at different positions, and the machine finds out when it is opened.
#[test]
fn no_read_is_answered_before_the_machine_has_looked_at_the_keys() {
    let replication = Some(options(&Cluster::default(), 1));
    let node = Node::start(&NodeConfig { replication, ..config(2) }).unwrap();
    let mut client = Client::connect(&node);
    ask(&mut client, "READONLY", "+OK\r\n");
    for request in ["GET key", "MGET key other"] {
        let said = client.ask(request);
        assert!(said.starts_with("-LOADING"), "{request}: {said}");
    }
    let machine = node.machine(Vec::new()).unwrap();
    ask(&mut client, "GET key", "$-1\r\n");
    drop(machine);
}

#[test]
fn a_node_whose_clock_was_set_back_is_told_the_truth_about_its_writes() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Arc::new(Cluster::default());
    cluster.lead(Some(9));
    let member = Member::start(&cluster, 9, on_disk(directory.path()));
    ask(&mut member.client(), "SET key one", "+OK\r\n");
    drop(member);
    // What the log still has of that run, and the store does not: its clock was far ahead.
    let mut state = cluster.state.lock().unwrap();
    for lane in 0..2_u16 {
        let turn = Turn { incarnation: u64::MAX / 2, number: 5 };
        let mut unit = vec![0; unit::HEAD_BYTES];
        let lane = LaneName { service: Tag::KEYS, node: 9, lane };
        unit::put_head(&mut unit, lane, 1, turn);
        state.entries.push(unit);
    }
    drop(state);
    let member = Member::start(&cluster, 9, on_disk(directory.path()));
    for client in [&mut member.client(), &mut member.client()] {
        ask(client, "SET key two", "+OK\r\n");
        ask(client, "APPEND key s", ":4\r\n");
        ask(client, "GET key", "$4\r\ntwos\r\n");
    }
}

/// A member ends by a signal behind a unit of a leader whose clock was ahead, and before its position was
/// recorded. What the next leader's units do there is what they do at the others: they run no earlier.
#[test]
fn the_log_s_time_is_known_again_where_a_unit_had_its_effects_and_is_skipped() {
    let (cluster, members) = cluster(1);
    let mut client = members[0].client();
    for request in ["SET key 1 PX 5000", "SET other 1", "INCR key"] {
        client.ask(request);
    }
    let mut units = cluster.state.lock().unwrap().entries.clone();
    drop(members);
    assert_eq!(units.len(), 3);
    let begin_ms = unit::Unit::decode(&units[0]).unwrap().unix_ms;
    for (unit, later_ms) in units.iter_mut().zip([0, 10_000, 500]) {
        unit[24..32].copy_from_slice(&(begin_ms + later_ms).to_le_bytes());
    }
    let apply = |machine: &mut Machine, position: usize| {
        let mut reply = Vec::new();
        machine.apply(Position(position as u64), &units[position - 1], &mut reply);
        reply
    };
    let run = |directory: &Path, prepare: &dyn Fn(&mut Machine)| {
        drop(Member::start_with(&Arc::default(), 9, on_disk(directory), prepare));
    };
    let (whole, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    run(whole.path(), &|machine| {
        apply(machine, 1);
        apply(machine, 2);
        assert!(apply(machine, 3).ends_with(b":1\r\n"), "the key's time was up");
    });
    run(cut.path(), &|machine| {
        apply(machine, 1);
        machine.flush(Position(1)).unwrap();
        apply(machine, 2);
    });
    run(cut.path(), &|machine| {
        assert_eq!(machine.applied(), Position(1));
        assert_eq!(apply(machine, 2), unit::REPEATED);
        assert!(apply(machine, 3).ends_with(b":1\r\n"), "the key lives on at this member");
    });
}

#[test]
fn no_read_sees_a_part_while_snapshots_are_installed() {
    const KEYS: usize = 1500;
    let source = tempfile::tempdir().unwrap();
    let target = tempfile::tempdir().unwrap();
    let cluster = Arc::new(Cluster::default());
    cluster.lead(Some(1));
    let leader = Member::start(&cluster, 1, config(2));
    let late = Member::start(&cluster, 9, on_disk(target.path()));
    let mut writer = leader.client();
    for key in 0..KEYS {
        ask(&mut writer, &format!("SET key{key} {key}"), "+OK\r\n");
    }
    late.catch_up();
    let (mut position, mut state) = (0, Vec::new());
    drop(Member::start_with(&cluster, 8, on_disk(source.path()), |machine| {
        let entries = cluster.state.lock().unwrap().entries.clone();
        position = entries.len() as u64;
        for (at, command) in (1..).zip(&entries) {
            machine.apply(Position(at), command, &mut Vec::new());
        }
        machine.flush(Position(position)).unwrap();
        machine.snapshot().unwrap()(&mut state).unwrap();
    }));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Two connections at each of two shards: linearizable reads, and stale ones.
        let readers: Vec<_> = (0..4)
            .map(|index| {
                let (mut client, stop) = (late.client(), &stop);
                scope.spawn(move || {
                    if index >= 2 {
                        ask(&mut client, "READONLY", "+OK\r\n");
                    }
                    // Long pipelines: what begins before an installation goes on in it.
                    let all: String = (0..KEYS).map(|key| format!("GET key{key}\r\n")).collect();
                    let (mut seen, started) = (0_u64, Instant::now());
                    // Whole ones at last, also where this thread got no processor until the end.
                    while seen == 0 || !stop.load(Ordering::Relaxed) {
                        let in_time = seen > 0 || started.elapsed() < PATIENCE;
                        assert!(in_time, "no read sees the keys");
                        client.send(&all);
                        for key in 0..KEYS {
                            let reply = client.reply();
                            let whole = reply == key.to_string();
                            assert!(whole || reply.starts_with("-LOADING"), "key{key}: {reply}");
                            seen += u64::from(whole);
                        }
                    }
                })
            })
            .collect();
        for round in 0..12 {
            cluster.state.lock().unwrap().restores.push((9, position, state.clone()));
            cluster.changed.notify_all();
            let started = Instant::now();
            while !cluster.state.lock().unwrap().restores.is_empty() {
                assert!(started.elapsed() < PATIENCE, "round {round}");
                std::thread::sleep(Duration::from_millis(2));
            }
            // Time to read in between.
            std::thread::sleep(Duration::from_millis(30));
        }
        stop.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}

#[test]
fn a_snapshot_under_overwrites_is_given_up_and_its_writer_goes_on() {
    let cluster = Arc::new(Cluster::default());
    let tight = || {
        let roomy = config(2);
        let pool = PoolOptions { capacity_bytes: 64 << 20, ..roomy.pool.clone() };
        NodeConfig { pool, ..roomy }
    };
    let members: Vec<_> = (1..=2).map(|id| Member::start(&cluster, id, tight())).collect();
    cluster.lead(Some(1));
    let mut writer = members[0].client();
    let value = "v".repeat(48 << 10);
    let mut overwrite = |rounds: u32| {
        for key in 0..rounds * 300 {
            ask(&mut writer, &format!("SET key{} {value}", key % 300), "+OK\r\n");
        }
    };
    overwrite(1);
    members[1].catch_up();
    cluster.state.lock().unwrap().snapshots.push(2);
    cluster.changed.notify_all();
    overwrite(6);
    members[1].catch_up();
    let mut reader = members[1].client();
    assert_eq!(reader.ask("STRLEN key7"), ":49152", "it did not stop");
    let started = Instant::now();
    let written = loop {
        if let Some(written) = cluster.state.lock().unwrap().written.pop() {
            break written;
        }
        assert!(started.elapsed() < PATIENCE, "the snapshot's writer ends");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(written.is_err_and(|error| error.contains("no room")));
    // The next one, when there is room, is written.
    cluster.state.lock().unwrap().snapshots.push(2);
    cluster.changed.notify_all();
    let started = Instant::now();
    while cluster.state.lock().unwrap().written.is_empty() {
        assert!(started.elapsed() < PATIENCE, "the second snapshot");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(cluster.state.lock().unwrap().written, [Ok(())]);
}

/// As the log of a follower without clients turns: the shards' threads sleep, and the last deletions of
/// many come too soon after a flush to wake them.
#[test]
fn a_member_without_clients_is_not_short_of_room_for_good_after_the_last_deletions() {
    let cluster = Arc::new(Cluster::default());
    cluster.lead(Some(1));
    let leader = Member::start(&cluster, 1, config(2));
    let mut writer = leader.client();
    let value = "v".repeat(48 << 10);
    for key in 0..725 {
        ask(&mut writer, &format!("SET key{key} {value}"), "+OK\r\n");
    }
    let gone: String = (0..500).map(|key| format!(" key{key}")).collect();
    ask(&mut writer, &format!("DEL{gone}"), ":500\r\n");
    let roomy = config(2);
    let pool = PoolOptions { capacity_bytes: 64 << 20, ..roomy.pool.clone() };
    drop(Member::start_with(&cluster, 2, NodeConfig { pool, ..roomy }, |machine| {
        let entries = cluster.state.lock().unwrap().entries.clone();
        let (last, before) = entries.split_last().unwrap();
        for (at, command) in (1..).zip(before) {
            machine.apply(Position(at), command, &mut Vec::new());
        }
        let end = Position(entries.len() as u64);
        machine.flush(Position(end.0 - 1)).unwrap();
        assert!(machine.is_short(), "the values take more than half of the pool");
        machine.apply(end, last, &mut Vec::new());
        machine.flush(end).unwrap();
        let started = Instant::now();
        while machine.is_short() {
            assert!(started.elapsed() < PATIENCE, "the garbage stays");
            std::thread::sleep(Duration::from_millis(10));
        }
    }));
}

/// A member ends by a signal when its pool has just become full, before it recorded its position. What comes again is
/// there, and needs no room; held, it would keep the member from every read until an operator made some.
#[test]
fn what_a_full_member_had_applied_is_not_held_for_want_of_room() {
    let cluster = Arc::new(Cluster::default());
    cluster.lead(Some(1));
    let leader = Member::start(&cluster, 1, config(2));
    let mut writer = leader.client();
    let value = "v".repeat(48 << 10);
    for key in 0..1000 {
        ask(&mut writer, &format!("SET key{key} {value}"), "+OK\r\n");
    }
    let entries = cluster.state.lock().unwrap().entries.clone();
    drop(leader);
    let directory = tempfile::tempdir().unwrap();
    let tight = || {
        let roomy = on_disk(directory.path());
        let pool = PoolOptions { capacity_bytes: 64 << 20, ..roomy.pool.clone() };
        NodeConfig { pool, ..roomy }
    };
    let has_room = |machine: &mut Machine, position: usize| {
        machine.has_room_for(Position(position as u64), 0, &entries[position - 1])
    };
    let (mut recorded, mut full) = (0, 0);
    drop(Member::start_with(&Arc::default(), 2, tight(), |machine| {
        full = (1..=entries.len())
            .find(|&position| {
                if !has_room(machine, position) {
                    return true;
                }
                machine.apply(Position(position as u64), &entries[position - 1], &mut Vec::new());
                if position % 20 == 0 {
                    recorded = position;
                    machine.flush(Position(position as u64)).unwrap();
                }
                false
            })
            .unwrap();
    }));
    assert!(recorded > 0 && recorded + 1 < full, "{recorded} of {full}");
    let member = Member::start_with(&Arc::default(), 2, tight(), |machine| {
        assert_eq!(machine.applied(), Position(recorded as u64));
        assert_eq!(machine.reached(), Position(full as u64 - 1));
        for position in recorded + 1..full {
            assert!(has_room(machine, position), "{position} of {recorded} to {full} is held");
            let mut reply = Vec::new();
            machine.apply(Position(position as u64), &entries[position - 1], &mut reply);
            assert_eq!(reply, unit::REPEATED);
        }
        machine.flush(Position(full as u64 - 1)).unwrap();
        assert!(!has_room(machine, full), "it is as full as it was");
    });
    let mut client = member.client();
    ask(&mut client, "READONLY", "+OK\r\n");
    assert_eq!(client.ask("STRLEN key0"), ":49152");
    assert_eq!(client.ask(&format!("STRLEN key{}", full - 2)), ":49152");
}
