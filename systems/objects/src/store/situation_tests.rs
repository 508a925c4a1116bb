//! Single situations of the store that random programs seldom come to, most of them once went wrong.

use super::core::{MOST_HUNGRY, Timer};
use super::model_tests::{SECOND, contents, id};
use super::rig::{Rig, Said, Todo};
use super::spill::Job;
use crate::wire::{Operation, Request, Status};

#[test]
fn what_is_restored_never_comes_to_lie_where_a_client_that_left_can_write() {
    let mut rig = Rig::new(2 << 20, 64 << 20);
    for client in [1, 2] {
        rig.core.join(client);
    }
    // One stays referenced by the other client, so that its segment stays when its writer leaves.
    rig.put(1, id(1), &contents(1, 50_000));
    let kept = rig.ask(2, Request::new(Operation::Get, id(1)));
    let segment = kept.location.segment;
    rig.leave(1);
    assert!(rig.core.memory().get(segment).is_some(), "the segment of a referenced object is gone");
    for number in 2..30 {
        rig.put(2, id(number), &contents(number, 100_000));
    }
    for number in 2..30 {
        let reply = rig.ask(2, Request::new(Operation::Get, id(number)));
        assert_eq!(reply.status, Status::Done);
        assert_ne!(reply.location.segment, segment, "object {number} lies in its memory");
        assert_eq!(rig.bytes(&reply.location, 100_000), Some(contents(number, 100_000)));
        let size = reply.location.handle;
        rig.request(2, Request { size, ..Request::new(Operation::Release, id(number)) });
        assert_eq!(rig.complaint, None);
    }
    assert!(rig.core.counters.restores > 0, "nothing was restored");
}

#[test]
pub(super) fn a_number_is_used_again_after_its_create_timed_out() {
    let mut rig = Rig::new(1 << 20, 0);
    rig.core.join(1);
    rig.core.join(2);
    // All memory is taken.
    let all = Request { size: 1 << 20, timeout_us: 1, ..Request::new(Operation::Create, id(1)) };
    let all = rig.ask(1, all);
    assert_eq!(all.status, Status::Done);
    let wanting = Request { size: 100, timeout_us: 10, ..Request::new(Operation::Create, id(2)) };
    rig.request_as(2, 5, wanting);
    rig.pass(SECOND);
    assert_eq!(rig.reply(2, 5).map(|reply| reply.status), Some(Status::Full));
    // The same number waits for an object that is not there, when memory comes free.
    let waits = Request { timeout_us: 60_000_000, ..Request::new(Operation::Get, id(3)) };
    rig.request_as(2, 5, waits);
    rig.leave(1);
    rig.all();
    assert!(rig.reply(2, 5).is_none(), "a get was answered as a create");
    assert_eq!(rig.core.waiting(), 1);
    assert_eq!(rig.core.memory().used(), 0);
}

#[test]
fn an_object_is_sealed_by_its_creator_alone_and_once() {
    let mut rig = Rig::new(1 << 20, 0);
    rig.core.join(1);
    rig.core.join(2);
    let create = Request { size: 100, timeout_us: 1, ..Request::new(Operation::Create, id(1)) };
    let handle = rig.ask(1, create).location.handle;
    let seal = Request { size: handle, ..Request::new(Operation::Seal, id(1)) };
    // Its number and its handle are no secret.
    assert_eq!(rig.ask(2, seal).status, Status::NotYours);
    assert_eq!(rig.ask(1, Request { id: id(2), ..seal }).status, Status::NotYours);
    let get = Request::new(Operation::Get, id(1));
    assert_eq!(rig.ask(2, get).status, Status::TimedOut, "it was served unsealed");
    assert_eq!(rig.ask(1, seal).status, Status::Done);
    assert_eq!(rig.ask(2, get).status, Status::Done);
    assert_eq!(rig.ask(1, seal).status, Status::NotYours, "it was sealed twice");
    assert_eq!(rig.core.counters.seals, 1);
    assert_eq!(rig.complaint, None);
}

#[test]
fn creates_that_time_out_leave_nothing_behind() {
    let mut rig = Rig::new(1 << 20, 0);
    rig.core.join(1);
    let all = Request { size: 1 << 20, timeout_us: 1, ..Request::new(Operation::Create, id(1)) };
    assert_eq!(rig.ask(1, all).status, Status::Done);
    for number in 0..10_000 {
        let create = Request::new(Operation::Create, id(2 + number));
        rig.request(1, Request { size: 1, timeout_us: 10, ..create });
        rig.pass(SECOND);
    }
    assert!(rig.core.hungry.len() < 200, "{} creates that are over", rig.core.hungry.len());
}

#[test]
fn a_large_object_comes_back_from_disk_beside_many_entries() {
    let mut rig = Rig::new(1 << 20, 64 << 20);
    rig.core.join(1);
    rig.put(1, id(0), &contents(0, 700_000));
    for number in 1..=2000 {
        rig.put(1, id(number), b"x");
    }
    // The oldest one has to go.
    rig.put(1, id(3000), &contents(1, 300_000));
    assert!(rig.core.spilled_bytes() >= 700_000);
    let get = Request { timeout_us: 60_000_000, ..Request::new(Operation::Get, id(0)) };
    let reply = rig.ask(1, get);
    assert_eq!(reply.status, Status::Done);
    assert!(rig.bytes(&reply.location, 700_000) == Some(contents(0, 700_000)));
    assert!(rig.core.memory().total() <= 1 << 20);
    assert_eq!(rig.complaint, None);
}

#[test]
fn a_large_object_takes_the_room_of_the_entries_that_go_for_it_and_no_more() {
    let mut rig = Rig::new(1 << 20, 0);
    rig.core.join(1);
    for number in 1..=1500 {
        rig.put(1, id(number), b"x");
    }
    // No client maps the two segments any more: they go at once, the first with 1,024 objects.
    rig.leave(1);
    rig.core.join(2);
    let create = Request { size: 800_000, ..Request::new(Operation::Create, id(3000)) };
    assert_eq!(rig.ask(2, create).status, Status::Done);
    assert_eq!(rig.core.table().held(), 1500 - 1024 + 1);
}

#[test]
pub(super) fn an_object_deleted_while_it_is_written_to_a_full_disk_is_gone() {
    for pinned in [false, true] {
        let mut rig = Rig::new(1 << 20, 64 << 20);
        rig.core.join(1);
        rig.put(1, id(1), &contents(1, 400_000));
        rig.put(1, id(2), &contents(2, 400_000));
        let more =
            Request { size: 400_000, timeout_us: 1_000, ..Request::new(Operation::Create, id(3)) };
        rig.request(1, more);
        while !matches!(rig.todo.front(), Some(Todo::Disk(_))) {
            rig.one(0, false);
        }
        if pinned {
            rig.request(1, Request::new(Operation::Pin, id(1)));
        }
        rig.request(1, Request::new(Operation::Delete, id(1)));
        rig.request(1, Request::new(Operation::Delete, id(2)));
        rig.one(0, !pinned);
        rig.pass(10 * SECOND);
        rig.all();
        rig.leave(1);
        assert_eq!(rig.core.memory().used(), 0, "deleted objects stay in memory");
        assert_eq!((rig.core.table().held(), rig.core.spilled_bytes()), (0, 0));
    }
}

#[test]
pub(super) fn a_full_disk_makes_room_without_another_call() {
    let mut rig = Rig::new(1 << 20, 64 << 20);
    rig.core.join(1);
    rig.put(1, id(1), &contents(1, 900_000));
    let wanting =
        Request { size: 900_000, timeout_us: 60_000_000, ..Request::new(Operation::Create, id(2)) };
    let tag = rig.request(1, wanting);
    let disk = |todo: &Todo| matches!(todo, Todo::Disk(Job::Spill { .. }));
    for _ in 0..3 {
        let place = rig.todo.iter().position(disk).expect("it is tried again");
        rig.one(place, true);
        assert!(rig.reply(1, tag).is_none());
        assert!(!rig.todo.iter().any(disk), "at once");
        rig.pass(2 * SECOND);
    }
    rig.all();
    assert_eq!(rig.reply(1, tag).map(|reply| reply.status), Some(Status::Done));
}

#[test]
fn a_fetch_that_names_a_node_asks_that_node_whatever_others_ask() {
    let mut rig = Rig::new(2 << 20, 0);
    rig.core.join(1);
    let wait = Request { timeout_us: 60_000_000, ..Request::new(Operation::Fetch, id(1)) };
    let nodes = ["10.0.0.1:4790", "[::1]:4791"].map(|node| node.parse().unwrap());
    let asked = |rig: &mut Rig| {
        let mut asked = rig.said.iter().filter_map(|said| match said {
            Said::Fetch(_, from) => Some(*from),
            _ => None,
        });
        asked.next_back()
    };
    let first = rig.request(1, wait.with_node(nodes[0]));
    let second = rig.request(1, wait.with_node(nodes[1]));
    let any = rig.request(1, wait);
    let mut left = vec![(Some(nodes[0]), first), (Some(nodes[1]), second), (None, any)];
    while !left.is_empty() {
        let from = asked(&mut rig).expect("each is asked in its turn");
        let place = left.iter().position(|(node, _)| *node == from).expect("and once");
        rig.said.clear();
        rig.core.fetched(id(1), false, rig.now_ns);
        rig.take();
        let (_, tag) = left.remove(place);
        let reply = rig.reply(1, tag).map(|reply| reply.status);
        assert_eq!(reply, Some(Status::Unreachable), "the fetch from {from:?}");
        assert!(left.iter().all(|(_, tag)| rig.reply(1, *tag).is_none()), "others wait on");
    }
    assert!(rig.core.fetching.is_empty());
}

#[test]
fn an_object_deleted_and_fetched_again_while_its_transfer_ends_is_fetched_again() {
    let mut rig = Rig::new(2 << 20, 0);
    rig.core.join(1);
    rig.core.join(2);
    let fetch = Request { timeout_us: 60_000_000, ..Request::new(Operation::Fetch, id(1)) };
    let first = rig.request(1, fetch);
    let asked = |rig: &mut Rig| {
        let place = rig.said.iter().position(|said| matches!(said, Said::Fetch(..)));
        place.map(|place| rig.said.remove(place)).is_some()
    };
    assert!(asked(&mut rig));
    // It comes through another client, the manager; the client that asked is answered at its seal.
    rig.put(2, id(1), b"fetched");
    assert_eq!(rig.reply(1, first).map(|reply| reply.status), Some(Status::Done));
    assert_eq!(rig.ask(1, Request::new(Operation::Delete, id(1))).status, Status::Done);
    let second = rig.request(1, fetch);
    assert!(!asked(&mut rig), "the first is not over yet");
    rig.core.fetched(id(1), true, rig.now_ns);
    rig.take();
    assert!(rig.reply(1, second).is_none(), "no node was asked for it");
    assert!(asked(&mut rig), "and none is");
    rig.put(2, id(1), b"once more");
    assert_eq!(rig.reply(1, second).map(|reply| reply.status), Some(Status::Done));
}

#[test]
fn a_client_that_was_stopped_and_unmaps_nothing_holds_no_other_up() {
    let mut rig = Rig::new(4 << 20, 0);
    for client in 1..=3 {
        rig.core.join(client);
    }
    // Segments of 256 KiB each: client 2 maps the first two and is stopped.
    let size = 256 << 10;
    for number in [1, 2] {
        rig.put(1, id(number), &contents(number, size));
        let got = rig.ask(2, Request::new(Operation::Get, id(number)));
        let release = Request::new(Operation::Release, id(number));
        rig.request(2, Request { size: got.location.handle, ..release });
    }
    for number in 3..=16 {
        rig.put(1, id(number), &contents(number, size));
    }
    assert_eq!(rig.ask(1, Request::new(Operation::Delete, id(1))).status, Status::Done);
    let stopped = |todo: &Todo| matches!(todo, Todo::Unmap { client: 2, .. });
    let create =
        Request { size, timeout_us: 60_000_000, ..Request::new(Operation::Create, id(20)) };
    let tag = rig.request(3, create);
    rig.todo.retain(|todo| !stopped(todo));
    rig.all();
    assert!(rig.reply(3, tag).is_none(), "the empty segment is what there is to have");
    rig.pass(2 * SECOND);
    rig.todo.retain(|todo| !stopped(todo));
    rig.all();
    assert_eq!(rig.reply(3, tag).map(|reply| reply.status), Some(Status::Done));
    // The oldest object went for nothing if it had to go.
    assert!(rig.core.table().find(id(2)).is_some(), "its memory would not have come free");
    assert!(rig.core.table().find(id(3)).is_none());
    assert_eq!(rig.complaint, None);
}

#[test]
fn an_object_that_its_creator_gives_up_is_looked_for_elsewhere() {
    let mut rig = Rig::new(2 << 20, 0);
    rig.core.join(1);
    rig.core.join(2);
    let create = Request { size: 10, timeout_us: 1_000, ..Request::new(Operation::Create, id(1)) };
    assert_eq!(rig.ask(1, create).status, Status::Done);
    let get = Request { timeout_us: 60_000_000, ..Request::new(Operation::Get, id(1)) };
    rig.request(2, Request { flags: crate::wire::FLAG_FETCH, ..get });
    assert!(!rig.said.iter().any(|said| matches!(said, Said::Fetch(..))), "it is made here");
    rig.leave(1);
    let asked = rig.said.iter().filter(|said| matches!(said, Said::Fetch(..))).count();
    assert_eq!(asked, 1);
}

#[test]
fn an_object_that_many_wait_for_is_looked_for_by_one_timer() {
    let mut rig = Rig::new(2 << 20, 0);
    rig.core.join(1);
    for _ in 0..20 {
        let get = Request { timeout_us: 900_000, ..Request::new(Operation::Get, id(1)) };
        rig.request(1, Request { flags: crate::wire::FLAG_FETCH, ..get });
        rig.core.fetched(id(1), false, rig.now_ns);
        rig.take();
        rig.pass(SECOND / 10_000);
    }
    let again = |timer: &&Timer| matches!(timer, Timer::FetchAgain { .. });
    assert_eq!(rig.core.timers.values().filter(again).count(), 1);
}

#[test]
fn a_client_has_no_more_creates_waiting_for_memory_than_may_be() {
    let mut rig = Rig::new(1 << 20, 0);
    rig.core.join(1);
    let all = Request { size: 1 << 20, timeout_us: 1, ..Request::new(Operation::Create, id(1)) };
    assert_eq!(rig.ask(1, all).status, Status::Done);
    let wanting = |number| Request {
        size: 10,
        timeout_us: 60_000_000,
        ..Request::new(Operation::Create, id(number))
    };
    let tags: Vec<u32> = (0..=MOST_HUNGRY as u64).map(|n| rig.request(1, wanting(2 + n))).collect();
    let (last, waiting) = tags.split_last().unwrap();
    assert_eq!(rig.reply(1, *last).map(|reply| reply.status), Some(Status::Limit));
    assert!(waiting.iter().all(|tag| rig.reply(1, *tag).is_none()));
}
