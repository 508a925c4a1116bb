//! Members that join, leave, lose what they had, and give a false identity.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(dead_code, reason = "what the tests of servers share has more than these need")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_replicated_log::{
    Boot, ClusterId, Durability, Founding, Handle, Home, HomeError, NO_SESSION, Position, Refusal,
};
use beeline_verify_log::lists::padded_append;
use beeline_verify_log::machine::append;
use common::{CLUSTER, Cluster, Gate, Held, LIMIT, contact, eventually, id, shm, small};

#[test]
fn members_join_leave_and_hand_over_under_load() {
    let mut cluster = Cluster::new(shm, 3, small());
    cluster.leader();
    cluster.create(3, &[]);
    cluster.start(3);
    for item in 1..=100 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    let members = cluster.at_leader("a join", |leader| {
        leader.join_wait(id(3), contact(3), LIMIT)?;
        Ok(leader.status().members.len())
    });
    assert_eq!(members, 4);
    let wanted: Vec<u32> = (1..=100).collect();
    eventually("the joiner has it", || (cluster.list(3, 1) == wanted).then_some(()));
    eventually("the leadership moves", || {
        let leader = cluster.handle(cluster.leader());
        leader.transfer_wait(id(3), LIMIT).ok()
    });
    eventually("the joiner leads", || (cluster.leader() == 3).then_some(()));
    cluster.append(NO_SESSION, 0, &append(1, 101));
    // The leader leaves by itself.
    let leave = |leader: &Handle| leader.leave_wait(id(3), LIMIT);
    let left = cluster.at_leader("the leader leaves", leave);
    assert!(left > Position(100));
    cluster.append(NO_SESSION, 0, &append(1, 102));
    // What it says of itself may be a moment old.
    eventually("another one leads", || (cluster.leader() != 3).then_some(()));
    assert_eq!(cluster.at_leader("there is nothing to do", leave), left);
    let unknown =
        cluster.at_leader("a transfer", |leader| match leader.transfer_wait(id(9), LIMIT) {
            Err(refusal) if refusal.is_retryable() => Err(refusal),
            told => Ok(told),
        });
    assert!(matches!(unknown, Err(Refusal::Membership { .. })), "{unknown:?}");
}

/// The leader's word for the join of `node`, once it has come.
fn joining(cluster: &Cluster, node: usize) -> std::sync::mpsc::Receiver<Result<Position, Refusal>> {
    joining_through(cluster, cluster.leader(), node)
}

fn joining_through(
    cluster: &Cluster,
    leader: usize,
    node: usize,
) -> std::sync::mpsc::Receiver<Result<Position, Refusal>> {
    let (sender, receiver) = std::sync::mpsc::channel();
    cluster.handle(leader).join(id(node), contact(node), move |told| {
        let _ = sender.send(told);
    });
    receiver
}

/// A server that shall join is met, and then does not become a member: it is told to leave while it
/// restores, for as long as the test wants. Nothing of it may hold up those that come after it, one
/// of the same name from another directory among them.
#[test]
fn a_join_that_is_taken_back_holds_up_no_later_one() {
    let mut cluster = Cluster::new(shm, 3, small());
    for item in 1..=300 {
        cluster.append(NO_SESSION, 0, &padded_append(1, item, 1000));
    }
    let gate = Arc::<Gate>::default();
    cluster.create(3, &[]);
    cluster.machine = Some(Held { gate: Some(Arc::clone(&gate)), ..Held::default() });
    cluster.start(3);
    let mut first = joining(&cluster, 3);
    eventually("it restores", || {
        if let Ok(Err(refusal)) = first.try_recv() {
            // On a loaded machine another member may lead by now, or the two did not meet in time.
            assert!(refusal.is_retryable(), "{refusal}");
            first = joining(&cluster, 3);
        }
        gate.reached.load(Ordering::Relaxed).then_some(())
    });
    assert!(first.try_recv().is_err(), "it learns");
    cluster.at_leader("it leaves", |leader| leader.leave_wait(id(3), LIMIT));
    let told = first.recv_timeout(LIMIT).unwrap();
    assert!(matches!(told, Err(Refusal::Membership { .. })), "{told:?}");
    gate.open.store(true, Ordering::Relaxed);
    cluster.stop(3);
    // One of that name from another directory, and one of another name.
    std::fs::remove_dir_all(cluster.path(3)).unwrap();
    for node in [3, 4] {
        cluster.create(node, &[]);
        cluster.start(node);
        cluster.at_leader("a join", |leader| leader.join_wait(id(node), contact(node), LIMIT));
    }
    let wanted: Vec<u32> = (1..=300).collect();
    for node in [3, 4] {
        eventually("it has all", || (cluster.list(node, 1) == wanted).then_some(()));
    }
}

/// The last member of a cluster that was three has promised nothing to a member that there still is: a new start of
/// its machine costs it at most what it acknowledged since, as a cluster that was founded with one member.
#[test]
fn the_last_member_of_a_cluster_that_shrank_is_opened_after_a_new_start_of_its_machine() {
    let mut cluster = Cluster::new(shm, 3, small());
    cluster.append(NO_SESSION, 0, &append(1, 1));
    let last = cluster.leader();
    for node in (0..3).filter(|node| *node != last) {
        eventually("it leaves", || {
            cluster.handle(cluster.leader()).leave_wait(id(node), LIMIT).ok()
        });
        cluster.stop(node);
    }
    cluster.append(NO_SESSION, 0, &append(1, 2));
    eventually("it says durably that it is alone", || {
        let status = cluster.handle(last).status();
        (status.snapshot > Position::NONE).then_some(())
    });
    cluster.stop(last);
    cluster.boot = Boot::named("second");
    cluster.start(last);
    cluster.append(NO_SESSION, 0, &append(1, 3));
    assert_eq!(cluster.list(last, 1), [1, 2, 3]);
}

/// One of three members has what was acknowledged but for one other, whose machine is started anew.
/// At level `process` that one must not make a majority of the rest: it comes back by way of a removal.
#[test]
fn a_member_whose_machine_was_started_anew_takes_no_part_at_process_until_it_was_removed() {
    let mut cluster = Cluster::new(shm, 3, small());
    cluster.append(NO_SESSION, 0, &append(1, 1));
    let leader = cluster.leader();
    let rest: Vec<_> = (0..3).filter(|node| *node != leader).collect();
    let (anew, behind) = (rest[0], rest[1]);
    cluster.stop(behind);
    cluster.append(NO_SESSION, 0, &append(1, 2));
    cluster.stop(leader);
    cluster.stop(anew);
    cluster.boot = Boot::named("second");
    let refused = cluster.open(anew);
    assert!(matches!(refused, Err(HomeError::Rebooted { .. })), "{refused:?}");
    // The others' machines were not.
    cluster.boot = Boot::named("first");
    cluster.start(behind);
    cluster.start(leader);
    cluster.append(NO_SESSION, 0, &append(1, 3));
    cluster.at_leader("it leaves", |leader| leader.leave_wait(id(anew), LIMIT));
    cluster.boot = Boot::named("second");
    std::fs::remove_dir_all(cluster.path(anew)).unwrap();
    cluster.create(anew, &[]);
    cluster.start(anew);
    cluster.at_leader("it joins", |leader| leader.join_wait(id(anew), contact(anew), LIMIT));
    cluster.append(NO_SESSION, 0, &append(1, 4));
    for node in 0..3 {
        let all = || (cluster.list(node, 1) == [1, 2, 3, 4]).then_some(());
        eventually("every member has all", all);
    }
}

#[test]
fn a_member_whose_machine_was_started_anew_votes_at_power() {
    let mut cluster = Cluster::at(shm, 3, small(), Durability::Power);
    cluster.append(NO_SESSION, 0, &append(1, 1));
    let leader = cluster.leader();
    let rest: Vec<_> = (0..3).filter(|node| *node != leader).collect();
    cluster.stop(rest[0]);
    cluster.boot = Boot::named("second");
    cluster.start(rest[0]);
    // Two of three are left, and one of them is the one that came back.
    cluster.stop(leader);
    cluster.append(NO_SESSION, 0, &append(1, 2));
    eventually("both are there", || (cluster.list(cluster.leader(), 1) == [1, 2]).then_some(()));
}

#[test]
fn a_server_of_another_cluster_and_one_with_a_taken_name_are_told() {
    let mut cluster = Cluster::new(shm, 3, small());
    // Two of them elect a leader; a name is taken where its server was met.
    eventually("all have met", || {
        let met = |node| {
            let members = cluster.handle(node).status().members;
            members.len() == 3 && members.iter().all(|member| member.connected)
        };
        (0..3).all(met).then_some(())
    });
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

/// A member that missed more than a ring gets a snapshot of a membership that it has seen already: nobody was
/// removed meanwhile, and nobody is forgotten.
#[test]
fn who_takes_in_a_snapshot_accepts_no_replaced_disk() {
    let mut cluster = Cluster::new(shm, 3, small());
    cluster.append(NO_SESSION, 0, &append(1, 1));
    // A membership that is later than the one under which the first members met.
    cluster.create(3, &[]);
    cluster.start(3);
    cluster.at_leader("a join", |leader| leader.join_wait(id(3), contact(3), LIMIT));
    eventually("it leaves", || cluster.handle(cluster.leader()).leave_wait(id(3), LIMIT).ok());
    cluster.stop(3);
    let leader = cluster.leader();
    let committed = cluster.handle(leader).status().committed;
    for node in 0..3 {
        eventually("all know", || {
            (cluster.handle(node).status().applied >= committed).then_some(())
        });
    }
    let mut others = (0..3).filter(|node| *node != leader);
    let (behind, replaced) = (others.next().unwrap(), others.next().unwrap());
    cluster.stop(behind);
    for item in 2..=300 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    cluster.start(behind);
    eventually("a snapshot is installed", || {
        (cluster.handle(behind).status().counters.snapshots_installed > 0).then_some(())
    });
    cluster.stop(replaced);
    std::fs::remove_dir_all(cluster.path(replaced)).unwrap();
    let members: Vec<_> = (0..3).map(|node| (id(node), contact(node))).collect();
    cluster.create(replaced, &members);
    cluster.start(replaced);
    for by in [leader, behind] {
        eventually("it is refused", || {
            let members = cluster.handle(replaced).status().members;
            let problem = members.into_iter().find(|member| member.id == id(by))?.problem?;
            problem.contains("taken").then_some(())
        });
    }
}

/// What it knows of others is all that tells a member's next run that it is not alone.
#[test]
fn a_member_that_cannot_note_that_it_is_alone_no_more_stops() {
    let mut cluster = Cluster::new(shm, 1, small());
    cluster.append(NO_SESSION, 0, &append(1, 1));
    std::fs::create_dir(cluster.path(0).join("known.new")).unwrap();
    cluster.create(1, &[]);
    cluster.start(1);
    let mut told = joining(&cluster, 1);
    let is_running = |cluster: &Cluster| cluster.servers[0].as_ref().unwrap().0.is_running();
    eventually("it stops", || {
        if is_running(&cluster)
            && let Ok(Err(Refusal::TimedOut)) = told.try_recv()
        {
            // A busy machine did not connect the two in time. It may stop at any moment now.
            told = joining_through(&cluster, 0, 1);
        }
        (!is_running(&cluster)).then_some(())
    });
    assert!(!matches!(told.recv_timeout(LIMIT), Ok(Ok(_))), "nothing is answered behind it");
    let (server, _) = cluster.servers[0].take().unwrap();
    assert!(server.stop().unwrap_err().to_string().contains("known"));
    cluster.transport.remove("n0");
    std::fs::remove_dir(cluster.path(0).join("known.new")).unwrap();
    cluster.start(0);
    eventually("both are members", || {
        (cluster.handle(cluster.leader()).status().members.len() == 2).then_some(())
    });
    cluster.append(NO_SESSION, 0, &append(1, 2));
    assert!(cluster.path(0).join("known").exists());
}

/// A server that learns is no member: that it has no room is its own matter, and it becomes one later.
#[test]
fn a_joiner_without_room_stops_no_writes_and_joins_once_it_has_some() {
    let mut cluster = Cluster::new(shm, 3, small());
    cluster.append(NO_SESSION, 0, &append(1, 1));
    let short = Arc::new(std::sync::atomic::AtomicBool::new(true));
    cluster.create(3, &[]);
    cluster.machine = Some(Held { short: Arc::clone(&short), ..Held::default() });
    cluster.start(3);
    let told = joining(&cluster, 3);
    eventually("it learns", || (cluster.list(3, 1) == [1]).then_some(()));
    for item in 2..=60 {
        cluster.append(NO_SESSION, 0, &append(1, item));
        std::thread::sleep(std::time::Duration::from_millis(10));
        for node in 0..3 {
            assert!(!cluster.handle(node).is_short(), "{node} refuses what needs room");
        }
    }
    assert!(!matches!(told.try_recv(), Ok(Ok(_))), "it waits until it has room");
    short.store(false, Ordering::Relaxed);
    // Of the leader of the moment: on a loaded machine it is not always the one that was asked first.
    cluster.at_leader("a join", |leader| leader.join_wait(id(3), contact(3), LIMIT));
}

/// What services ask before they take what needs room. The word of a follower is read by the leader,
/// and the leader's by the others; of a member that is not there none is kept.
#[test]
fn every_member_hears_of_one_that_has_no_room() {
    let mut cluster = Cluster::new(shm, 3, small());
    cluster.append(NO_SESSION, 0, &append(1, 1));
    let leader = cluster.leader();
    let follower = (0..3).find(|node| *node != leader).unwrap();
    for node in [follower, leader] {
        cluster.stop(node);
        let short = Arc::new(std::sync::atomic::AtomicBool::new(false));
        cluster.machine = Some(Held { short: Arc::clone(&short), ..Held::default() });
        cluster.start(node);
        let all_say = |expected: bool| {
            let says = |node| cluster.handle(node).is_short() == expected;
            eventually("all members say so", || (0..3).all(says).then_some(()));
        };
        all_say(false);
        short.store(true, Ordering::Relaxed);
        all_say(true);
        // What a status says may be a moment old.
        eventually("the leader names it", || {
            let status = cluster.handle(cluster.leader()).status();
            let named = status.members.iter().filter(|member| member.short).map(|member| member.id);
            (named.collect::<Vec<_>>() == [id(node)]).then_some(())
        });
        // The log itself goes on: deletions are entries, too.
        cluster.append(NO_SESSION, 0, &append(2, 1));
        short.store(false, Ordering::Relaxed);
        all_say(false);
        short.store(true, Ordering::Relaxed);
        all_say(true);
        cluster.stop(node);
        let says = |other: &usize| cluster.handle(*other).is_short();
        eventually("it is not waited for", || {
            let running = cluster.running();
            (!running.iter().any(says)).then_some(())
        });
        cluster.start(node);
    }
}
