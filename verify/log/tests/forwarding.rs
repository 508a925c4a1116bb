//! What a member has the leader propose, over fabric: answers, refusals, bounds, leaders that go.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(dead_code, reason = "what the tests of servers share has more than these need")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use beeline_replicated_log::{Consistency, Handle, NodeId, Refusal};
use beeline_verify_log::lists::padded_append;
use beeline_verify_log::machine::append;
use common::{
    Cluster, Held, LIMIT, LONG_ANSWER, Provider, contact, eventually, id, shm, small, tcp,
};

/// Has `asker` ask again while that may help, as a courier does; which member leads is asked anew. On a
/// loaded machine the asker itself may have come to lead: then it hands the leadership over.
fn at_leader<T>(
    cluster: &Cluster,
    asker: usize,
    what: &str,
    ask: impl Fn(&Handle, NodeId) -> Result<T, Refusal>,
) -> T {
    let handle = cluster.handle(asker);
    eventually(what, || {
        let leader = cluster.leader();
        if leader == asker {
            let other = cluster.running().into_iter().find(|node| *node != asker).unwrap();
            let _ = handle.transfer_wait(id(other), LIMIT);
            return None;
        }
        match ask(handle, id(leader)) {
            Ok(answer) => Some(answer),
            Err(refusal) if refusal.is_retryable() => None,
            Err(refusal) => panic!("{what}: {refusal}"),
        }
    })
}

fn a_leader_does_what_others_ask(provider: Provider) {
    let cluster = Cluster::new(provider, 3, small());
    let leader = cluster.leader();
    let mut wanted = Vec::new();
    for asker in (0..3).filter(|node| *node != leader) {
        let handle = cluster.handle(asker);
        for item in 1..=20 {
            let item = 100 * asker as u32 + item;
            let reply = at_leader(&cluster, asker, "an append", |handle, leader| {
                handle.forward_wait(leader, padded_append(1, item, 90 * 20), LIMIT)
            });
            wanted.push(item);
            // More, if a leader was lost on a loaded machine, and one was asked for again.
            assert!(u64::from_le_bytes(reply.try_into().unwrap()) >= wanted.len() as u64);
        }
        let position = at_leader(&cluster, asker, "a barrier", |handle, leader| {
            handle.forward_barrier_wait(leader, LIMIT)
        });
        eventually("it is applied here", || (handle.status().applied >= position).then_some(()));
        let mut list = cluster.list(asker, 1);
        list.dedup();
        assert_eq!(list, wanted);
        // Longer than all messages that may be on their way.
        let item = LONG_ANSWER + asker as u32;
        let long = at_leader(&cluster, asker, "a long answer", |handle, leader| {
            handle.forward_wait(leader, append(2, item), LIMIT)
        });
        assert_eq!(long.len(), 300_008);
        assert!(long[8..].iter().all(|byte| *byte == 7));
    }
    let asker = (0..3).find(|node| *node != leader).unwrap();
    let handle = cluster.handle(asker);
    let refused = at_leader(&cluster, asker, "a refusal", |handle, leader| {
        match handle.forward_wait(leader, b"odd".to_vec(), LIMIT) {
            Err(Refusal::Refused { reason }) => Ok(reason),
            other => Err(other.expect_err("it is no append")),
        }
    });
    assert_eq!(refused, "an append is longer");
    let refused = handle.forward_wait(id(leader), vec![1; 5000], LIMIT);
    assert!(matches!(refused, Err(Refusal::TooLarge { bytes: 5024, .. })), "{refused:?}");
    let refused = handle.forward_wait(NodeId(9), append(1, 1), LIMIT);
    assert_eq!(refused, Err(Refusal::Unreachable { member: NodeId(9) }));
    eventually("a follower refuses", || {
        let leader = cluster.leader();
        let other = (0..3).find(|node| ![asker, leader].contains(node)).unwrap();
        let command = handle.forward_wait(id(other), append(3, 1), LIMIT);
        let barrier = handle.forward_barrier_wait(id(other), LIMIT);
        let refused = (command.err()?, barrier.err()?);
        let not_leader = |refusal: &Refusal| matches!(refusal, Refusal::NotLeader { .. });
        (not_leader(&refused.0) && not_leader(&refused.1)).then_some(())
    });
    // A status is told every few milliseconds.
    eventually("all is counted", || {
        let all: Vec<_> = (0..3).map(|node| cluster.handle(node).status().counters).collect();
        let sent: u64 = all.iter().map(|counters| counters.forwards_sent).sum();
        let served: u64 = all.iter().map(|counters| counters.forwards_served).sum();
        (sent >= 47 && served >= 47).then_some(())
    });
}

#[test]
fn a_leader_does_what_others_ask_over_shm() {
    a_leader_does_what_others_ask(shm);
}

#[test]
fn a_leader_does_what_others_ask_over_tcp() {
    a_leader_does_what_others_ask(tcp);
}

/// Members whose machines have room for as many commands as the test says.
fn with_room(provider: Provider) -> (Cluster, Vec<Arc<AtomicU64>>) {
    let mut cluster = Cluster::new(provider, 0, small());
    let members: Vec<_> = (0..3).map(|node| (id(node), contact(node))).collect();
    let rooms: Vec<_> = (0..3).map(|_| Arc::new(AtomicU64::new(1 << 40))).collect();
    for (node, room) in rooms.iter().enumerate() {
        cluster.create(node, &members);
        cluster.machine = Some(Held { room: Some(Arc::clone(room)), ..Held::default() });
        cluster.start(node);
    }
    (cluster, rooms)
}

/// A leader, and a member that has asked it for something.
fn leader_and_asker(cluster: &Cluster) -> (usize, usize) {
    let leader = cluster.leader();
    let asker = cluster.running().into_iter().find(|node| *node != leader).unwrap();
    let leader = at_leader(cluster, asker, "an append", |handle, leader| {
        handle.forward_wait(leader, append(1, 1), LIMIT).map(|_| leader)
    });
    (usize::from(leader.0), asker)
}

type Told = Receiver<Result<Vec<u8>, Refusal>>;

fn ask(cluster: &Cluster, asker: usize, leader: usize, item: u32, limit: Duration) -> Told {
    let (sender, told) = channel();
    cluster.handle(asker).forward(id(leader), append(1, item), limit, move |outcome| {
        let _ = sender.send(outcome);
    });
    told
}

/// Keeps a member's thread from everything else until the sender is dropped.
fn hold(cluster: &Cluster, node: usize) -> Sender<()> {
    let (let_go, held) = channel::<()>();
    let (holding, holds) = channel();
    cluster.handle(node).query(vec![1], Consistency::Stale, move |_| {
        let _ = holding.send(());
        let _ = held.recv_timeout(LIMIT);
    });
    holds.recv_timeout(LIMIT).unwrap();
    let_go
}

/// Each question that fails is told so, once; what was asked may take effect.
fn questions_that_fail_are_told_so(provider: Provider) {
    let (mut cluster, rooms) = with_room(provider);
    let limit = Duration::from_millis(100);
    eventually("a question to a leader that is silent", || {
        let (leader, asker) = leader_and_asker(&cluster);
        let let_go = hold(&cluster, leader);
        let since = Instant::now();
        let told = ask(&cluster, asker, leader, 2, limit).recv_timeout(LIMIT).unwrap();
        drop(let_go);
        match told {
            Err(Refusal::TimedOut) => {
                assert!(since.elapsed() >= limit);
                Some(())
            }
            // On a loaded machine it led no more, or was not connected.
            Err(refusal) if refusal.is_retryable() => None,
            told => panic!("{told:?}"),
        }
    });
    // A leader that cannot apply what it committed hands the leadership over.
    let (leader, asker) = leader_and_asker(&cluster);
    rooms[leader].store(0, Ordering::SeqCst);
    let told = ask(&cluster, asker, leader, 4, 5 * LIMIT).recv_timeout(LIMIT).unwrap();
    assert!(told.as_ref().is_err_and(Refusal::is_retryable), "{told:?}");
    cluster.stop(leader);
    // The next leader does as it is asked.
    let asker = leader_and_asker(&cluster).1;
    let gone = ask(&cluster, asker, leader, 6, LIMIT / 4).recv_timeout(LIMIT).unwrap();
    assert!(matches!(gone, Err(Refusal::Unreachable { .. } | Refusal::Lost)), "{gone:?}");
}

#[test]
fn a_question_to_a_silent_leader_ends_in_time_over_shm() {
    questions_that_fail_are_told_so(shm);
}

#[test]
fn a_question_to_a_silent_leader_ends_in_time_over_tcp() {
    questions_that_fail_are_told_so(tcp);
}

fn more_than_a_leader_takes_is_refused_at_once(provider: Provider) {
    let cluster = Cluster::new(provider, 3, small());
    let (leader, asker) = leader_and_asker(&cluster);
    let let_go = hold(&cluster, leader);
    let told: Vec<_> =
        (0..1200).map(|item| ask(&cluster, asker, leader, 2 + item, 5 * LIMIT)).collect();
    let refused = || cluster.handle(asker).status().counters.forwards_refused;
    eventually("those too many are refused", || (refused() >= 1200 - 1024).then_some(()));
    drop(let_go);
    let (mut done, mut full) = (Vec::new(), 0);
    for (item, told) in (2..).zip(told) {
        match told.recv_timeout(LIMIT).unwrap() {
            Ok(_) => done.push(item),
            Err(Refusal::Full) => full += 1,
            // On a loaded machine it was taken for hung.
            Err(refusal) => assert!(refusal.is_retryable(), "{refusal}"),
        }
    }
    assert!(full >= 1200 - 1024, "{full}");
    let mut list = eventually("what was told as done", || {
        let list = cluster.list(cluster.leader(), 1);
        done.iter().all(|item| list.contains(item)).then_some(list)
    });
    let all = list.len();
    list.sort_unstable();
    list.dedup();
    assert_eq!(list.len(), all, "each once");
}

#[test]
fn more_than_a_leader_takes_is_refused_at_once_over_shm() {
    more_than_a_leader_takes_is_refused_at_once(shm);
}

#[test]
fn more_than_a_leader_takes_is_refused_at_once_over_tcp() {
    more_than_a_leader_takes_is_refused_at_once(tcp);
}
