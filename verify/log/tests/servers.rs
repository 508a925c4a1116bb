//! Servers on threads of their own, found through a transport inside the process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_replicated_log::{
    Config, Consistency, Handle, Home, Layout, NO_SESSION, Position, Refusal, RoleName, Server,
    StateMachine as _,
};
use beeline_verify_log::lists::padded_append;
use beeline_verify_log::machine::append;
use common::{
    Cluster, Gate, Held, LIMIT, Provider, contact, eventually, id, process, shm, small, tcp,
};

fn agrees_and_survives_a_restart_of_all(provider: Provider) {
    let mut cluster = Cluster::new(provider, 3, small());
    let session = cluster.at_leader("a session", |leader| leader.session(LIMIT));
    for item in 1..=20 {
        assert_eq!(cluster.append(session, item, &append(1, item as u32)), item);
    }
    let wanted: Vec<u32> = (1..=20).collect();
    for node in 0..3 {
        eventually("every server has it", || (cluster.list(node, 1) == wanted).then_some(()));
    }
    let told = eventually("a follower has seen the leader lead", || {
        let leader = cluster.leader();
        let follower = (0..3).find(|node| *node != leader).unwrap();
        match cluster.handle(follower).call(session, 22, append(1, 22), LIMIT) {
            Err(Refusal::NotLeader { leader }) => leader.map(|(_, told)| told),
            // It leads by now, or did.
            Err(Refusal::OutOfTurn { expected: 21 } | Refusal::Lost) => None,
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
    let again = |leader: &Handle| leader.call(session, 20, append(1, 20), LIMIT);
    assert!(cluster.at_leader("the last reply", again).repeated);
    assert_eq!(cluster.append(session, 21, &append(1, 21)), 21);
}

#[test]
fn three_servers_agree_and_survive_a_restart_over_shm() {
    agrees_and_survives_a_restart_of_all(shm);
}

#[test]
fn three_servers_agree_and_survive_a_restart_within_a_process() {
    agrees_and_survives_a_restart_of_all(process);
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
    // The leader's, and on a busy machine perhaps one more, of a voter whose log it lacked.
    assert!(counters.snapshots_installed > 0, "{counters:?}");
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
fn who_missed_more_than_the_ring_gets_a_snapshot_within_a_process() {
    catches_up_by_snapshot(process);
}

#[test]
fn who_missed_more_than_the_ring_gets_a_snapshot_over_tcp() {
    catches_up_by_snapshot(tcp);
}

/// One of three restores a snapshot, until the gate is open, and `fails` at it then. Leaders look often whether it
/// needs another one.
fn with_one_that_restores(fails: bool) -> (Cluster, usize, Arc<Gate>) {
    let mut cluster = Cluster::new(shm, 3, small());
    (0..3).for_each(|node| cluster.stop(node));
    cluster.options.snapshot_retry = Duration::from_millis(200);
    (0..3).for_each(|node| cluster.start(node));
    let away = cluster.leave_behind(300);
    let gate = Arc::<Gate>::default();
    cluster.machine = Some(Held { gate: Some(Arc::clone(&gate)), fails, ..Held::default() });
    cluster.start(away);
    eventually("it restores", || gate.reached.load(Ordering::Relaxed).then_some(()));
    (cluster, away, gate)
}

/// The others go on under the same leader, which makes one more snapshot ready for the member and not another each time
/// it looks. The member's own thread does what needs no state: it promises itself to the next leader, and says to
/// readers that they have to ask again.
#[test]
fn a_member_that_restores_a_snapshot_for_long_holds_nobody_up() {
    let (cluster, away, gate) = with_one_that_restores(false);
    let mut items = 300;
    // On a loaded machine the two others suspect each other for nothing, though not each time.
    eventually("the same leader all the while", || {
        let leader = cluster.leader();
        let status = cluster.handle(leader).status();
        let (term, sent) = (status.term, status.counters.snapshots_sent);
        // Longer than any patience, and more than a ring.
        let (started, until) = (Instant::now(), items + 150);
        while items < until || started.elapsed() < Duration::from_millis(800) {
            items += 1;
            cluster.append(NO_SESSION, 0, &append(1, items));
        }
        let status = cluster.handle(leader).status();
        ((status.role, status.term) == (RoleName::Leader, term)).then_some(())?;
        let more = status.counters.snapshots_sent - sent;
        assert!(more <= 1, "{more} snapshots were made ready for a member that restores one");
        Some(())
    });
    let asked = cluster.handle(away).read(vec![1], Consistency::Stale, LIMIT);
    assert!(matches!(asked, Err(Refusal::Full)), "{asked:?}");
    let term = cluster.handle(cluster.leader()).status().term;
    eventually("it hears of another leader while it restores", || {
        let leader = cluster.leader();
        let other = (0..3).find(|node| ![leader, away].contains(node)).unwrap();
        let _ = cluster.handle(leader).transfer_wait(id(other), LIMIT);
        (cluster.handle(away).status().term > term).then_some(())
    });
    assert_eq!(cluster.handle(away).status().counters.snapshots_installed, 0);
    gate.open.store(true, Ordering::Relaxed);
    let wanted: Vec<u32> = (1..=items).collect();
    eventually("the server is back", || (cluster.list(away, 1) == wanted).then_some(()));
}

/// Its folder can be opened right after.
#[test]
fn a_member_that_stops_while_it_restores_a_snapshot_ends_when_that_is_done() {
    let (mut cluster, away, gate) = with_one_that_restores(false);
    cluster.transport.remove(&format!("n{away}"));
    let (server, _) = cluster.servers[away].take().unwrap();
    let stopping = std::thread::spawn(move || server.stop());
    std::thread::sleep(Duration::from_millis(100));
    assert!(!stopping.is_finished(), "its machine is at work");
    gate.open.store(true, Ordering::Relaxed);
    stopping.join().unwrap().unwrap();
    drop(Home::open_under(&cluster.path(away), cluster.durability, &cluster.boot).unwrap());
    cluster.start(away);
    let wanted: Vec<u32> = (1..=300).collect();
    eventually("the server is back", || (cluster.list(away, 1) == wanted).then_some(()));
}

#[test]
fn a_member_whose_machine_fails_to_restore_a_snapshot_ends_and_restores_it_when_it_is_opened() {
    let (mut cluster, away, gate) = with_one_that_restores(true);
    gate.open.store(true, Ordering::Relaxed);
    let (server, handle) = cluster.servers[away].take().unwrap();
    cluster.transport.remove(&format!("n{away}"));
    eventually("it ends by itself", || (!server.is_running()).then_some(()));
    assert_eq!(handle.status().counters.snapshots_installed, 0);
    let said = server.stop().unwrap_err().to_string();
    assert!(said.contains("the medium is broken"), "{said}");
    cluster.start(away);
    let wanted: Vec<u32> = (1..=300).collect();
    eventually("the server is back", || (cluster.list(away, 1) == wanted).then_some(()));
}

/// What a client that always writes sees of a ring that cannot be snapshotted: it waits a little,
/// then hears why, and nothing that was acknowledged is lost or repeated.
#[test]
fn a_full_log_says_why_and_goes_on_once_snapshots_can_be_written() {
    let cluster = Cluster::new(shm, 3, small());
    cluster.append(NO_SESSION, 0, &append(1, 1));
    cluster.broken.store(true, Ordering::Relaxed);
    // Of the member that leads: on a loaded machine another one may by now, and an item whose answer
    // was lost with its leader is appended again.
    let ask = |item| cluster.handle(cluster.leader()).call(NO_SESSION, 0, append(1, item), LIMIT);
    let list = |node| {
        let mut list = cluster.list(node, 1);
        list.dedup();
        list
    };
    let mut items = 1;
    let refused = eventually("the log is full", || match ask(items + 1) {
        Ok(_) => {
            items += 1;
            assert!(items < 200, "the ring has 64 slots");
            None
        }
        Err(refusal @ Refusal::LogFull { .. }) => Some(refusal),
        Err(refusal) => {
            assert!(refusal.is_retryable(), "{refusal}");
            None
        }
    });
    let said = refused.to_string();
    assert!(said.contains("the log is full") && said.contains("no room, says the test"), "{said}");
    assert!(items >= 32, "{items}: the ring was used before");
    // At once, now that it is known.
    eventually("it says so again", || {
        let started = Instant::now();
        let again = ask(items + 1).expect_err("there is no room");
        assert!(again.is_retryable() && started.elapsed() < LIMIT / 2, "{again}");
        matches!(again, Refusal::LogFull { .. }).then_some(())
    });
    // Reads need no room. One more is there where its answer was lost.
    let there = list(cluster.leader()).len() - items as usize;
    assert!(there <= 1, "{there} more than {items}");
    cluster.broken.store(false, Ordering::Relaxed);
    eventually("it goes on", || match ask(items + 1) {
        Ok(_) => Some(()),
        Err(refusal) if refusal.is_retryable() => None,
        Err(other) => panic!("{other}"),
    });
    let wanted: Vec<u32> = (1..=items + 1).collect();
    for node in 0..3 {
        eventually("all of it is there", || (list(node) == wanted).then_some(()));
    }
}

/// Three members whose machines last by themselves.
fn of_durable_machines() -> Cluster {
    let mut cluster = Cluster::new(shm, 3, small());
    for node in 0..3 {
        cluster.stop(node);
        cluster.machine = Some(Held { durable: true, ..Held::default() });
        cluster.start(node);
    }
    cluster
}

/// A disk that takes a log's head and not a copy of the machine's state; what the log needs of it goes
/// first. Neither a member that wants the state nor a user who asks for it stops the writes.
#[test]
fn a_state_that_cannot_be_written_keeps_no_durable_machine_s_ring_from_having_room() {
    let mut cluster = of_durable_machines();
    let leader = cluster.leader();
    let away = (0..3).find(|node| *node != leader).unwrap();
    cluster.stop(away);
    for item in 1..=200 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    cluster.broken.store(true, Ordering::Relaxed);
    cluster.machine = Some(Held { durable: true, ..Held::default() });
    cluster.start(away);
    let failed = |cluster: &Cluster| {
        let of = |node| cluster.handle(node).status().counters.snapshots_failed;
        cluster.running().into_iter().map(of).sum::<u64>()
    };
    eventually("its state is wanted", || (failed(&cluster) > 0).then_some(()));
    for item in 201..=300 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    assert!(cluster.list(away, 1).is_empty(), "there was no state to be had");
    cluster.broken.store(false, Ordering::Relaxed);
    let wanted: Vec<u32> = (1..=300).collect();
    eventually("it has the state", || (cluster.list(away, 1) == wanted).then_some(()));
    let written = cluster.at_leader("the state", |leader| leader.snapshot_wait(LIMIT));
    assert!(written >= Position(300), "{written}");
}

#[test]
fn a_snapshot_whose_writer_panics_failed_and_is_taken_again() {
    let mut cluster = Cluster::new(shm, 1, small());
    cluster.stop(0);
    let panics = Arc::new(AtomicBool::new(true));
    cluster.machine = Some(Held { panics: Arc::clone(&panics), ..Held::default() });
    cluster.start(0);
    cluster.append(NO_SESSION, 0, &append(1, 1));
    let told = cluster.handle(0).snapshot_wait(LIMIT);
    let said = told.map_err(|refusal| refusal.to_string()).unwrap_err();
    assert!(said.contains("panicked"), "{said}");
    panics.store(false, Ordering::Relaxed);
    // More than the ring holds.
    for item in 2..=200 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    cluster.handle(0).snapshot_wait(LIMIT).unwrap();
}

#[test]
fn a_member_whose_machine_lost_what_it_kept_does_not_start() {
    let mut cluster = of_durable_machines();
    let node = cluster.leader();
    for item in 1..=200 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    eventually("its log was cut", || {
        (cluster.handle(node).status().snapshot > Position::NONE).then_some(())
    });
    cluster.stop(node);
    let home = cluster.open(node).unwrap();
    let config = Config::new(shm(), cluster.transport.clone(), contact(node));
    let started = Server::start(home, config, Held { durable: true, ..Held::default() });
    let said = started.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(said.contains("what it kept was lost"), "{said}");
}

/// A snapshot that is too much for a member is refused while the member still has what it had: it goes
/// on voting, starts again as it was, and takes a later one once it has room.
#[test]
fn a_member_without_room_for_a_snapshot_keeps_what_it_has_and_takes_one_when_it_has_room() {
    let mut cluster = Cluster::new(shm, 3, small());
    let away = cluster.leave_behind(200);
    (0..3).filter(|node| *node != away).for_each(|node| cluster.stop(node));
    cluster.options.snapshot_retry = Duration::from_millis(500);
    let narrow = Arc::new(AtomicBool::new(true));
    let refuse = |cluster: &mut Cluster| {
        cluster.machine = Some(Held { narrow: Arc::clone(&narrow), ..Held::default() });
        cluster.start(away);
        eventually("a snapshot is refused", || {
            (cluster.handle(away).status().counters.snapshots_failed > 0).then_some(())
        });
        assert!(cluster.list(away, 1).len() <= 1, "it has what it had");
    };
    (0..3).filter(|node| *node != away).for_each(|node| cluster.start(node));
    refuse(&mut cluster);
    cluster.stop(away);
    refuse(&mut cluster);
    let other = (0..3).find(|node| *node != cluster.leader() && *node != away).unwrap();
    narrow.store(false, Ordering::Relaxed);
    let wanted: Vec<u32> = (1..=200).collect();
    eventually("it has all", || (cluster.list(away, 1) == wanted).then_some(()));
    cluster.stop(other);
    cluster.append(NO_SESSION, 0, &append(1, 201));
}

/// As one that is restored from a backup: its log begins where its machine is, and is not filled up to
/// there.
#[test]
fn a_cluster_founded_upon_a_machine_that_has_much_begins_behind_it() {
    let has = Position(1 << 40);
    let mut cluster = Cluster::new(shm, 0, small());
    cluster.create(0, &[(id(0), contact(0))]);
    let mut machine = Held { durable: true, has, ..Held::default() };
    machine.lists.apply(has, &append(1, 1), &mut Vec::new());
    cluster.machine = Some(machine);
    cluster.start(0);
    cluster.append(NO_SESSION, 0, &append(1, 2));
    let applied = eventually("it tells of the append", || {
        let applied = cluster.handle(0).status().applied;
        (applied > has).then_some(applied)
    });
    assert!(applied.since(has) < 10, "{applied}");
    cluster.create(1, &[]);
    cluster.start(1);
    cluster.at_leader("a join", |leader| leader.join_wait(id(1), contact(1), LIMIT));
    eventually("the joiner has it", || (cluster.list(1, 1) == [1, 2]).then_some(()));
}

/// As where the member ended in its first run before it recorded a position, and got a new folder for its log.
#[test]
fn what_a_machine_began_under_another_log_is_not_taken_for_this_one_s() {
    let mut cluster = Cluster::new(shm, 0, small());
    let founded = Arc::new(AtomicU64::new(0));
    let began = || {
        let (reached, founded) = (Position(30), Arc::clone(&founded));
        Some(Held { durable: true, reached, founded, ..Held::default() })
    };
    cluster.create(0, &[(id(0), contact(0))]);
    cluster.machine = began();
    cluster.start(0);
    assert_eq!(founded.load(Ordering::SeqCst), 1, "it is told of a log that begins");
    cluster.append(NO_SESSION, 0, &append(1, 1));
    // And not of one that goes on.
    cluster.stop(0);
    cluster.machine = began();
    cluster.start(0);
    cluster.append(NO_SESSION, 0, &append(1, 2));
    assert_eq!(founded.load(Ordering::SeqCst), 1);
    eventually("all of it is there", || (cluster.list(0, 1) == [1, 2]).then_some(()));
}

/// As after a loss of power that took the end of the log, and not all of what the machine had made of it: nothing
/// new stands where the machine would skip a part of it.
#[test]
fn a_member_alone_goes_on_behind_what_it_has_a_part_of_and_no_log_has() {
    let mut cluster = Cluster::new(shm, 1, small());
    for item in 1..=5 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    let has = eventually("it tells of the appends", || {
        let applied = cluster.handle(0).status().applied;
        (applied >= Position(5)).then_some(applied)
    });
    let reached = has.plus(20);
    // It ends before it records more: the second time, what was lost stands in its log.
    for item in 6..=7 {
        cluster.stop(0);
        let mut machine = Held { durable: true, has, reached, ..Held::default() };
        for item in 1..=5 {
            machine.lists.apply(has, &append(1, item), &mut Vec::new());
        }
        cluster.machine = Some(machine);
        cluster.start(0);
        cluster.append(NO_SESSION, 0, &append(1, item));
        let wanted: Vec<u32> = (1..=item).collect();
        eventually("all of it is there, once", || (cluster.list(0, 1) == wanted).then_some(()));
        eventually("it is behind what was lost", || {
            (cluster.handle(0).status().applied > reached).then_some(())
        });
    }
}

/// It would take what it has a part of for lost, and end; beside others it waits until they have given it all.
#[test]
fn a_member_with_a_part_of_what_its_log_lacks_leads_once_it_has_caught_up() {
    let mut cluster = Cluster::new(shm, 3, small());
    for item in 1..=5 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    let has = eventually("a member tells of the appends", || {
        let applied = cluster.handle(0).status().applied;
        (applied >= Position(5)).then_some(applied)
    });
    let reached = has.plus(20);
    (0..3).for_each(|node| cluster.stop(node));
    let mut machine = Held { durable: true, has, reached, ..Held::default() };
    for item in 1..=5 {
        machine.lists.apply(has, &append(1, item), &mut Vec::new());
    }
    cluster.machine = Some(machine);
    (0..3).for_each(|node| cluster.start(node));
    assert_ne!(cluster.leader(), 0);
    // It is asked to, and does not.
    let asked = cluster.handle(cluster.leader()).transfer_wait(id(0), Duration::from_millis(500));
    assert!(asked.is_err(), "{asked:?}");
    let mut items = 5;
    while cluster.handle(0).status().applied <= reached {
        items += 1;
        cluster.append(NO_SESSION, 0, &append(1, items));
        assert!(items < 100, "it does not follow");
    }
    let wanted: Vec<u32> = (1..=items).collect();
    eventually("it has all of it", || (cluster.list(0, 1) == wanted).then_some(()));
    eventually("it leads", || {
        let leader = cluster.leader();
        if leader != 0 {
            let _ = cluster.handle(leader).transfer_wait(id(0), LIMIT);
        }
        (cluster.leader() == 0).then_some(())
    });
    cluster.append(NO_SESSION, 0, &append(1, items + 1));
}

/// Appends an item by whichever of these members leads.
fn written_by(members: &[Handle], key: u8, item: u32) -> Option<()> {
    members.iter().find_map(|member| match member.call(NO_SESSION, 0, append(key, item), LIMIT) {
        Ok(_) => Some(()),
        Err(refusal) => {
            assert!(refusal.is_retryable(), "{refusal}");
            None
        }
    })
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
            // On a loaded machine the other one of these may lead by now.
            let of = |node| cluster.handle(node).clone();
            let handles: Vec<_> = (0..3).filter(|node| *node != away).map(of).collect();
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                let (mut written, mut longest) = (0_u32, Duration::ZERO);
                while !stop.load(Ordering::Relaxed) {
                    let started = Instant::now();
                    eventually("an append", || written_by(&handles, key, written + 1));
                    longest = longest.max(started.elapsed());
                    written += 1;
                }
                (written, longest)
            })
        })
        .collect();
    let status = |cluster: &Cluster| cluster.handle(cluster.leader()).status();
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
        after.counters.snapshots_sent.saturating_sub(before.counters.snapshots_sent)
    );
    assert!(meanwhile > 50, "writers went on: {meanwhile}");
    for (key, (written, _)) in written.iter().enumerate() {
        let wanted: Vec<u32> = (1..=*written).collect();
        let is_there = || {
            let mut list = cluster.list(away, key as u8);
            // Appended again, where an answer was lost with its leader.
            list.dedup();
            (list == wanted).then_some(())
        };
        eventually("all of it is there", is_there);
    }
}

/// As after a loss of power that took the word of what is committed, which is written without being
/// persisted, and not what the machine had persisted.
#[test]
fn a_machine_that_is_further_on_than_its_log_takes_the_place_a_snapshot_gives_it() {
    let mut cluster = Cluster::new(shm, 3, small());
    let away = cluster.leave_behind(300);
    let leader = cluster.leader();
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
        eventually("another one leads", || (cluster.leader() != leader).then_some(()));
        cluster.stop(leader);
        cluster.append(NO_SESSION, 0, &append(2, item));
        cluster.start(leader);
    }
    // No member is left to give it to.
    let leader = cluster.leader();
    (0..3).filter(|node| *node != leader).for_each(|node| cluster.stop(node));
    let (server, handle) = cluster.servers[leader].as_ref().unwrap();
    let started = Instant::now();
    assert!(!server.hand_over(LIMIT));
    assert!(started.elapsed() < LIMIT, "it gives up where waiting cannot help");
    // A member that has ended leads nobody.
    let handle = handle.clone();
    cluster.stop(leader);
    assert_eq!((handle.status().role, handle.status().leader), (RoleName::Stopped, None));
}

/// Members that take seconds to miss a leader, so that there is none for a while.
#[test]
fn a_member_that_is_about_to_stop_waits_for_an_election_to_end() {
    let mut cluster = Cluster::new(shm, 3, small());
    (0..3).for_each(|node| cluster.stop(node));
    cluster.options.patience = Duration::from_secs(1);
    (0..3).for_each(|node| cluster.start(node));
    let status = eventually("the members are connected", || {
        let status = cluster.handle(0).status();
        let connected = status.members.iter().filter(|member| member.connected).count();
        (connected == 3).then_some(status)
    });
    println!("leader as it is told to stop: {:?}", status.leader);
    assert!(cluster.servers[0].as_ref().unwrap().0.hand_over(LIMIT));
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

/// A cluster of three over shm, one of which has room for ten commands.
fn with_one_that_fills_up() -> (Cluster, usize, Arc<AtomicU64>) {
    let mut cluster = Cluster::new(shm, 3, small());
    let leader = cluster.leader();
    let full = (0..3).find(|node| *node != leader).unwrap();
    cluster.stop(full);
    let room = Arc::new(AtomicU64::new(10));
    cluster.machine = Some(Held { room: Some(Arc::clone(&room)), ..Held::default() });
    cluster.start(full);
    for item in 1..=30 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    eventually("it holds what it has no room for", || {
        (cluster.list(full, 1).len() == 10 && cluster.handle(full).status().committed.0 >= 30)
            .then_some(())
    });
    (cluster, full, room)
}

/// What was committed before the leader knew has to wait at a member without room, which does not stop.
#[test]
fn a_member_without_room_for_what_was_agreed_on_waits_and_goes_on_with_room() {
    let (cluster, full, room) = with_one_that_fills_up();
    let leader = cluster.leader();
    eventually("all know", || cluster.handle(leader).status().short.then_some(()));
    assert!(cluster.handle(full).status().applied.0 < 30);
    room.store(1000, Ordering::SeqCst);
    let wanted: Vec<u32> = (1..=30).collect();
    eventually("it went on", || (cluster.list(full, 1) == wanted).then_some(()));
    eventually("all know", || (!cluster.handle(leader).status().short).then_some(()));
    // Its ring goes round: snapshots are taken again.
    for item in 31..=200 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    let wanted: Vec<u32> = (1..=200).collect();
    eventually("it keeps up", || (cluster.list(full, 1) == wanted).then_some(()));
    assert_eq!(room.load(Ordering::SeqCst), 1000 - 190);
}

#[test]
fn a_member_without_room_holds_up_no_other_and_gets_a_snapshot_in_the_end() {
    let (cluster, full, room) = with_one_that_fills_up();
    // More than a ring.
    for item in 31..=300 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    let wanted: Vec<u32> = (1..=300).collect();
    eventually("it has what a snapshot gave it", || {
        let list = cluster.list(full, 1);
        (list.len() > 100 && list == wanted[..list.len()]).then_some(())
    });
    room.store(1000, Ordering::SeqCst);
    eventually("it keeps up", || (cluster.list(full, 1) == wanted).then_some(()));
}

#[test]
fn a_member_without_room_does_not_go_on_leading() {
    let (cluster, full, room) = with_one_that_fills_up();
    let leader = cluster.leader();
    let handed = cluster.handle(leader).transfer_wait(id(full), LIMIT);
    println!("asked to lead: {handed:?}");
    for item in 31..=40 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    assert_ne!(cluster.leader(), full);
    let wanted: Vec<u32> = (1..=40).collect();
    room.store(1000, Ordering::SeqCst);
    eventually("it keeps up", || (cluster.list(full, 1) == wanted).then_some(()));
}
