//! Readers that follow the log: of every member, across restarts and snapshots, and slower than the ring.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(dead_code, reason = "what the tests of servers share has more than these need")]

mod common;

use std::time::Duration;

use beeline_replicated_log::{Follower, Layout, NO_SESSION, Position, Refusal};
use beeline_replicated_service::{LaneName, LogHandle, Tag, Turn, Unit, unit};
use beeline_verify_log::lists::items;
use beeline_verify_log::machine::append;
use common::{Cluster, LIMIT, eventually, process, small};

/// Takes entries until all of these items have come, in order, and nothing else; the last position.
fn takes(follower: &mut Follower, wanted: impl Iterator<Item = u32>) -> Position {
    let (mut last, mut came) = (Position::NONE, Vec::new());
    for item in wanted {
        if came.is_empty() {
            let entry = follower.next(LIMIT).unwrap().expect("there is an entry");
            assert!(entry.position > last, "{entry:?}");
            last = entry.position;
            came = entry.commands.into_iter().map(|command| command.bytes).rev().collect();
        }
        assert_eq!(came.pop(), Some(append(1, item)));
    }
    assert!(came.is_empty());
    last
}

fn oldest(follower: &mut Follower) -> Position {
    match follower.next(LIMIT) {
        Err(Refusal::Gone { oldest }) => oldest,
        other => panic!("{other:?}"),
    }
}

/// The state of a member, and a reader from behind it.
fn anew(cluster: &Cluster, node: usize) -> (Vec<u32>, Follower) {
    let (position, state) = cluster.handle(node).state_wait(vec![1], LIMIT).unwrap();
    (items(&state), cluster.handle(node).follow(position.next()))
}

#[test]
fn readers_at_every_member_get_each_command_in_order_and_wait_for_the_next() {
    // No reader is slower than this ring.
    let cluster = Cluster::new(process, 3, Layout::new(1024, 2048).unwrap());
    let mut followers: Vec<_> =
        (0..3).map(|node| cluster.handle(node).follow(Position::NONE)).collect();
    for item in 1..=20 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    for follower in &mut followers {
        takes(follower, 1..=20);
        assert_eq!(follower.next(Duration::from_millis(20)), Ok(None), "nothing new");
    }
    std::thread::scope(|scope| {
        let waiting: Vec<_> = followers
            .iter_mut()
            .map(|follower| scope.spawn(move || takes(follower, 21..=300)))
            .collect();
        for item in 21..=300 {
            cluster.append(NO_SESSION, 0, &append(1, item));
        }
        let last = waiting.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>();
        assert!(last.iter().all(|position| *position == last[0]), "{last:?}");
    });
}

#[test]
fn a_reader_slower_than_the_ring_is_told_where_to_begin_anew_and_misses_nothing() {
    let cluster = Cluster::new(process, 3, small());
    let mut slow: Vec<_> = (0..3).map(|node| cluster.handle(node).follow(Position(1))).collect();
    for item in 1..=300 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    for (node, follower) in slow.iter_mut().enumerate() {
        eventually("it has all", || (cluster.list(node, 1).len() == 300).then_some(()));
        let oldest = oldest(follower);
        let applied = cluster.handle(node).state_wait(vec![1], LIMIT).unwrap().0;
        assert!(oldest.since(Position(1)) > 100 && oldest <= applied.next(), "{oldest} {applied}");
        // The oldest that is kept can be had. A member that took in a snapshot of all may keep none.
        if oldest <= applied {
            let kept = cluster.handle(node).follow(oldest).next(LIMIT).unwrap();
            assert!(kept.is_some_and(|entry| entry.position >= oldest));
        }
        let (list, mut again) = anew(&cluster, node);
        assert_eq!(list.len(), 300);
        assert_eq!(again.next(Duration::ZERO), Ok(None));
        *follower = again;
    }
    cluster.append(NO_SESSION, 0, &append(1, 301));
    for follower in &mut slow {
        takes(follower, 301..=301);
    }
}

#[test]
fn a_reader_goes_on_where_it_was_after_a_restart_and_at_another_member() {
    let mut cluster = Cluster::new(process, 3, Layout::new(1024, 2048).unwrap());
    for item in 1..=20 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    let position = takes(&mut cluster.handle(0).follow(Position::NONE), 1..=20);
    let mut waits = cluster.handle(0).follow(position.next());
    cluster.stop(0);
    assert_eq!(waits.next(LIMIT), Err(Refusal::Stopped));
    for item in 21..=30 {
        cluster.append(NO_SESSION, 0, &append(1, item));
    }
    cluster.start(0);
    for node in 0..3 {
        takes(&mut cluster.handle(node).follow(position.next()), 21..=30);
    }
}

#[test]
fn a_member_that_took_in_a_snapshot_keeps_no_entry_before_it() {
    let mut cluster = Cluster::new(process, 3, small());
    let away = cluster.leave_behind(300);
    cluster.start(away);
    let mut waits = cluster.handle(away).follow(Position(200));
    eventually("it is back", || (cluster.list(away, 1).len() == 300).then_some(()));
    let installed = cluster.handle(away).status().counters.snapshots_installed;
    assert!(installed > 0);
    let oldest = oldest(&mut waits);
    assert!(oldest > Position(200), "{oldest}");
    let (list, mut follower) = anew(&cluster, away);
    assert_eq!(list.len(), 300);
    cluster.append(NO_SESSION, 0, &append(1, 301));
    takes(&mut follower, 301..=301);
}

#[test]
fn units_of_one_service_are_told_once_each() {
    let other = Tag(Tag::FIRST_FREE.0 + 1);
    let cluster = Cluster::new(process, 1, small());
    let log = LogHandle::new(cluster.handle(0).clone(), cluster.layout.max_payload_bytes());
    let mut units = log.follow(Tag::FIRST_FREE, Position::NONE);
    // The third was proposed twice.
    for (service, number) in
        [(Tag::FIRST_FREE, 1), (other, 9), (Tag::FIRST_FREE, 1), (Tag::FIRST_FREE, 2)]
    {
        let mut bytes = vec![0; unit::HEAD_BYTES];
        let turn = Turn { incarnation: 1, number };
        unit::put_head(&mut bytes, LaneName { service, node: 1, lane: 0 }, 1, turn);
        cluster.append(NO_SESSION, 0, &bytes);
    }
    // No unit at all.
    cluster.append(NO_SESSION, 0, &append(1, 1));
    for number in [1, 2] {
        let told = units.next(LIMIT).unwrap().expect("there is a unit");
        assert_eq!(Unit::decode(&told.bytes).unwrap().turn, Turn { incarnation: 1, number });
    }
    assert_eq!(units.next(Duration::from_millis(20)), Ok(None));
}
