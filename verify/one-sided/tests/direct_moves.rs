//! Servers join and leave a map of direct stores while clients go on.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/direct.rs"]
mod common;
#[path = "common/history.rs"]
mod history;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_env::Randomness;
use beeline_kv_direct::membership::{Change, MembershipError, Progress, change, reports};
use beeline_kv_direct::mover::control;
use beeline_kv_direct::processor::moves::FORCED;
use beeline_kv_direct::{
    Connect as _, DirectClient, DirectClientError, HashRing, Kind, LinkOptions, Request, ServerMap,
    Status,
};
use common::{DEVICES, Open, World, shm, tcp};

const LIMIT: Duration = Duration::from_secs(60);

fn changed(
    world: &World,
    known: &[&str],
    what: Change,
    name: &str,
) -> Result<u64, MembershipError> {
    let mut connect = world.connect(LinkOptions::default());
    let known: Vec<String> = known.iter().map(|&name| name.to_owned()).collect();
    let mut moved = 0;
    change(&mut connect, &known, what, name, LIMIT, &mut |progress| {
        if let Progress::Done { moved: pairs } = progress {
            moved = pairs;
        }
    })?;
    Ok(moved)
}

fn pairs(world: &World, name: &str) -> u64 {
    let reports = reports(&mut world.connect(LinkOptions::default()), name).unwrap();
    reports.iter().map(|report| report.pairs).sum()
}

fn key(number: u32) -> Vec<u8> {
    // Keys of several lengths; values are inline and in blocks.
    [&number.to_le_bytes()[..], &vec![7; number as usize % 20]].concat()
}

fn value(number: u32, version: u32) -> Vec<u8> {
    let length = [4, 40, 300][(number % 3) as usize];
    let mut value = vec![number as u8; length];
    value[..4].copy_from_slice(&version.to_le_bytes());
    value
}

fn fill(client: &mut DirectClient, count: u32) {
    for part in (0..count).collect::<Vec<_>>().chunks(50) {
        let held: Vec<_> = part.iter().map(|&n| (key(n), value(n, 0))).collect();
        let puts: Vec<Request<'_>> = held.iter().map(|(k, v)| Request::put(k, v)).collect();
        client.execute(&puts, &mut |_, status, _| assert_eq!(status, Status::Ok)).unwrap();
    }
}

fn check(client: &mut DirectClient, count: u32, versions: &HashMap<u32, Option<u32>>) {
    for number in 0..count {
        let expected = versions.get(&number).copied().unwrap_or(Some(0));
        let expected = expected.map(|version| value(number, version));
        assert_eq!(client.get(&key(number)).unwrap(), expected, "key {number}");
    }
}

/// Random operations on keys of this thread alone, each checked against a plain map.
fn mine(
    client: &mut DirectClient,
    (thread, threads, count): (u32, u32, u32),
    stop: &AtomicBool,
    done: &AtomicU64,
) -> HashMap<u32, Option<u32>> {
    let mut random = Randomness::new(thread.into());
    let mut versions: HashMap<u32, Option<u32>> = HashMap::new();
    let mut version = 0;
    while !stop.load(Ordering::Relaxed) {
        let batch: Vec<_> = (0..16)
            .map(|_| {
                version += 1;
                let number = random.below(u64::from(count / threads)) as u32 * threads + thread;
                (number, random.below(8), key(number), value(number, version), version)
            })
            .collect();
        let requests: Vec<Request<'_>> = batch
            .iter()
            .map(|(_, what, key, value, _)| match what {
                0..4 => Request::get(key),
                4 => Request::delete(key),
                _ => Request::put(key, value),
            })
            .collect();
        let mut expected = Vec::new();
        for (number, what, _, _, version) in &batch {
            let held = versions.entry(*number).or_insert(Some(0));
            expected.push(held.map(|version| value(*number, version)));
            match what {
                0..4 => {}
                4 => *held = None,
                _ => *held = Some(*version),
            }
        }
        client
            .execute(&requests, &mut |index, status, bytes| {
                let (number, what, ..) = &batch[index];
                let expected = &expected[index];
                let there = if expected.is_some() { Status::Ok } else { Status::NotFound };
                match what {
                    0..4 => {
                        assert_eq!((status, bytes), (there, expected.as_deref()), "key {number}");
                    }
                    4 => assert_eq!(status, there, "key {number}"),
                    _ => assert_eq!(status, Status::Ok, "key {number}"),
                }
            })
            .unwrap();
        done.fetch_add(16, Ordering::Relaxed);
    }
    versions
}

/// Lets each client do `more`.
fn go_on(done: &[AtomicU64], more: u64) {
    let until = Instant::now() + LIMIT;
    let now = || done.iter().map(|done| done.load(Ordering::Relaxed));
    let goal: Vec<u64> = now().map(|done| done + more).collect();
    while now().zip(&goal).any(|(done, goal)| done < *goal) {
        assert!(Instant::now() < until, "clients go on");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn keys_move_to_a_server_that_joins_and_from_one_that_leaves_under_load() {
    const COUNT: u32 = 6000;
    const THREADS: u32 = 3;
    for (open, processors) in [(DEVICES[0], 1), (DEVICES[1], 2)] {
        let mut world = World::new(open, 3, processors);
        fill(&mut world.client(), COUNT);
        let fourth = world.start();
        let stop = AtomicBool::new(false);
        let done: [AtomicU64; THREADS as usize] = Default::default();
        let three: Vec<String> = ["0", "1", "2"].map(str::to_owned).to_vec();
        let (versions, world) = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let connect = world.connect(LinkOptions::default());
                    let (three, stop) = (three.clone(), &stop);
                    let done = &done[thread as usize];
                    scope.spawn(move || {
                        let mut client = DirectClient::connect(three, Box::new(connect)).unwrap();
                        mine(&mut client, (thread, THREADS, COUNT), stop, done)
                    })
                })
                .collect();
            go_on(&done, 100);
            let moved = changed(&world, &["0", "1", "2"], Change::Join, &fourth).unwrap();
            // About a quarter of the keys; the load holds some of them absent.
            let all: u64 = ["0", "1", "2", "3"].map(|name| pairs(&world, name)).iter().sum();
            let share = all / 4;
            assert!((share / 2..share * 2).contains(&moved), "{moved} of {all} moved");
            go_on(&done, 400);
            // One that was there from the beginning leaves, and ends: its name is in every client.
            let moved = changed(&world, &["3"], Change::Leave, "1").unwrap();
            assert!(moved > all / 8, "{moved} of {all} moved");
            assert_eq!(pairs(&world, "1"), 0);
            go_on(&done, 400);
            world.end(1);
            go_on(&done, 400);
            stop.store(true, Ordering::Relaxed);
            let mut versions = HashMap::new();
            for thread in threads {
                versions.extend(thread.join().unwrap());
            }
            (versions, world)
        });
        // A client that names one server only finds the map, and all acknowledged pairs.
        let mut client = world.client_of(&["2".to_owned()]);
        assert_eq!((client.state(), client.ring().servers().len()), (4, 3));
        check(&mut client, COUNT, &versions);
        let held: u64 = ["0", "2", "3"].map(|name| pairs(&world, name)).iter().sum();
        let present = (0..COUNT).filter(|n| versions.get(n).is_none_or(Option::is_some)).count();
        assert_eq!(held, present as u64, "each pair is at one server");
    }
}

/// Histories of clients over `open` while a server joins and another leaves.
fn histories(open: Open) -> history::History {
    let mut world = World::new(open, 2, 1);
    let third = world.start();
    let clock = Instant::now();
    let stop = AtomicBool::new(false);
    let done: [AtomicU64; 4] = Default::default();
    let two: Vec<String> = ["0", "1"].map(str::to_owned).to_vec();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let connect = world.connect(LinkOptions::default());
                let (two, stop, done) = (two.clone(), &stop, &done[number as usize]);
                scope.spawn(move || {
                    let mut client = DirectClient::connect(two, Box::new(connect)).unwrap();
                    history::run(&mut client, number, 30, clock, |_| {
                        done.fetch_add(1, Ordering::Relaxed);
                        stop.load(Ordering::Relaxed)
                    })
                })
            })
            .collect();
        go_on(&done, 30);
        changed(&world, &["0", "1"], Change::Join, &third).unwrap();
        go_on(&done, 30);
        changed(&world, &["0"], Change::Leave, "0").unwrap();
        go_on(&done, 30);
        stop.store(true, Ordering::Relaxed);
        history::joined(threads.into_iter().map(|thread| thread.join().unwrap()))
    })
}

#[test]
fn histories_of_clients_have_one_order_for_each_key_while_keys_move() {
    for open in [shm as Open, tcp] {
        let all = histories(open);
        assert!(history::calls(&all) > 300);
        assert_eq!(history::unexplained(&all), Vec::<u64>::new());
    }
}

/// The planted bug: a server that holds on to the ring that was, and executes what it gave away.
#[test]
fn a_server_that_keeps_keys_it_gave_away_is_found_by_the_histories() {
    let mut world = World::new(shm, 2, 1);
    let third = world.start();
    let mut keys = world.client_of(&["0".to_owned(), "1".to_owned()]);
    (0..30_u64).for_each(|key| assert!(!keys.delete(&key.to_le_bytes()).unwrap()));
    changed(&world, &["0", "1"], Change::Join, &third).unwrap();
    for me in ["0", "1"] {
        let (mut link, _) = world.connect(LinkOptions::default()).connect(me, 0).unwrap();
        let ring = HashRing::new(["0", "1"].map(str::to_owned));
        let stale = ServerMap { state: 4, me: me.to_owned(), old: HashRing::default(), ring };
        let request = stale.encode();
        let told = control(&mut link, &Request::control(Kind::SetMap, FORCED, &request)).unwrap();
        assert_eq!(told.0, Status::Ok);
    }
    let clock = Instant::now();
    let all = std::thread::scope(|scope| {
        let threads: Vec<_> = ["0", "2"]
            .iter()
            .enumerate()
            .map(|(number, name)| {
                let world = &world;
                scope.spawn(move || {
                    // It learns the map of the server it names.
                    let mut client = world.client_of(&[(*name).to_owned()]);
                    history::run(&mut client, number as u32, 30, clock, |batches| batches == 150)
                })
            })
            .collect();
        history::joined(threads.into_iter().map(|thread| thread.join().unwrap()))
    });
    assert!(!history::unexplained(&all).is_empty(), "two servers executed one key's operations");
}

#[test]
fn a_full_server_takes_what_it_can_and_nothing_acknowledged_is_lost() {
    let mut world = World::with_memory(shm, 1, 1, 32 << 20);
    let mut client = world.client();
    // More than a smaller server's half holds.
    const COUNT: u32 = 24_000;
    let held = vec![5; 500];
    for part in (0..COUNT).collect::<Vec<_>>().chunks(60) {
        let keys: Vec<_> = part.iter().map(|n| n.to_le_bytes()).collect();
        let puts: Vec<_> = keys.iter().map(|key| Request::put(key, &held)).collect();
        client.execute(&puts, &mut |_, status, _| assert_eq!(status, Status::Ok)).unwrap();
    }
    let small = world.start_with(8 << 20);
    let mut connect = world.connect(LinkOptions::default());
    let (known, until) = (["0".to_owned()], Instant::now() + LIMIT);
    loop {
        let limit = Duration::from_millis(200);
        let ended = change(&mut connect, &known, Change::Join, &small, limit, &mut |_| {});
        let Err(MembershipError::Unfinished { note, .. }) = ended else { panic!("{ended:?}") };
        if note.contains("no memory left") {
            break;
        }
        assert!(Instant::now() < until, "{note}");
    }
    let mut present = 0;
    for number in 0..COUNT {
        let found = client.get(&number.to_le_bytes()).unwrap();
        present += u32::from(found.as_deref() == Some(&held[..]));
    }
    assert_eq!(present, COUNT, "what was acknowledged stays readable");
    // Room is made, and the same change comes to its end.
    for number in 0..COUNT {
        if number % 4 != 0 {
            assert!(client.delete(&number.to_le_bytes()).unwrap());
        }
    }
    changed(&world, &["0"], Change::Join, &small).unwrap();
    for number in (0..COUNT).step_by(4) {
        assert_eq!(client.get(&number.to_le_bytes()).unwrap().as_deref(), Some(&held[..]));
    }
    assert_eq!(pairs(&world, "0") + pairs(&world, "1"), u64::from(COUNT / 4));
}

#[test]
fn a_server_that_ends_while_keys_move_costs_its_own_pairs_alone() {
    let mut world = World::new(tcp, 2, 1);
    const COUNT: u32 = 3000;
    fill(&mut world.client(), COUNT);
    let third = world.start();
    // The change begins, and no program waits for its end; then the server that joins is gone.
    let mut connect = world.connect(LinkOptions::default());
    let known = ["0", "1"].map(str::to_owned);
    let gone = change(&mut connect, &known, Change::Join, &third, Duration::ZERO, &mut |_| {});
    assert!(matches!(gone, Ok(()) | Err(MembershipError::Unfinished { .. })), "{gone:?}");
    world.end(2);
    let again = changed(&world, &["0"], Change::Leave, "1");
    assert!(again.is_err(), "another change is not begun");
    assert_eq!(changed(&world, &["0"], Change::Lost, &third).unwrap(), 0);
    let mut client = world.client_of(&["0".to_owned()]);
    let mut found = 0;
    for number in 0..COUNT {
        let held = client.get(&key(number)).unwrap();
        assert!(held.is_none() || held == Some(value(number, 0)));
        found += u32::from(held.is_some());
        client.put(&key(number), &value(number, 1)).unwrap();
    }
    assert!(found > COUNT / 2, "{found} pairs were at the servers that go on");
    let versions = (0..COUNT).map(|number| (number, Some(1))).collect();
    check(&mut world.client_of(&["1".to_owned()]), COUNT, &versions);
}

#[test]
fn changes_that_cannot_be_are_refused_and_change_nothing() {
    let mut world = World::new(shm, 3, 1);
    let two = ["0", "1"];
    let mut client = world.client_of(&two.map(str::to_owned));
    client.put(b"key", b"value").unwrap();
    // A server with pairs of its own.
    world.client_of(&["2".to_owned()]).put(b"other", b"value").unwrap();
    let refused = changed(&world, &two, Change::Join, "2");
    assert!(matches!(refused, Err(MembershipError::NotEmpty { pairs: 1, .. })), "{refused:?}");
    let unknown = changed(&world, &two, Change::Leave, "2");
    assert!(matches!(unknown, Err(MembershipError::Unknown { .. })), "{unknown:?}");
    let last = changed(&world, &["0"], Change::Leave, "0");
    assert!(matches!(last, Err(MembershipError::Last { .. })), "{last:?}");
    assert_eq!(client.get(b"key").unwrap().unwrap(), b"value");
    // A server that was started anew is told so, and taken in again.
    world.client_of(&["2".to_owned()]).delete(b"other").unwrap();
    changed(&world, &two, Change::Join, "2").unwrap();
    assert_eq!(client.get(b"key").unwrap().unwrap(), b"value");
    world.end(2);
    world.start();
    world.targets.lock().unwrap().swap(2, 3);
    let until = Instant::now() + LIMIT;
    let forgot = (0..u32::MAX).find_map(|number| match client.put(&number.to_le_bytes(), b"v") {
        Err(DirectClientError::Forgot { server }) => Some(server),
        // Its link ended with the server that was.
        Ok(()) | Err(DirectClientError::Link { .. }) if Instant::now() < until => None,
        other => panic!("{other:?}"),
    });
    assert_eq!(forgot.as_deref(), Some("2"));
    changed(&world, &["0"], Change::Join, "2").unwrap();
    let mut client = world.client_of(&["0".to_owned()]);
    for number in 0..200_u32 {
        client.put(&number.to_le_bytes(), b"v").unwrap();
        assert_eq!(client.get(&number.to_le_bytes()).unwrap().unwrap(), b"v");
    }
}

#[test]
fn a_server_that_was_not_told_of_a_loss_is_told_when_it_is_asked_for_again() {
    let mut world = World::new(shm, 3, 1);
    changed(&world, &["0", "1"], Change::Join, "2").unwrap();
    world.end(2);
    // The first is told, the second cannot be reached for a moment.
    let second = world.targets.lock().unwrap()[1].take();
    let half = changed(&world, &["0"], Change::Lost, "2");
    assert!(matches!(half, Err(MembershipError::Link { .. })), "{half:?}");
    world.targets.lock().unwrap()[1] = second;
    changed(&world, &["0", "1"], Change::Lost, "2").unwrap();
    let connect = &mut world.connect(LinkOptions::default());
    let maps = ["0", "1"].map(|name| reports(connect, name).unwrap()[0].map.clone());
    assert_eq!(maps[0].state, maps[1].state);
    assert!(maps.iter().all(|map| map.ring.servers() == ["0", "1"]), "{maps:?}");
    let mut client = world.client_of(&["1".to_owned()]);
    fill(&mut client, 300);
    check(&mut client, 300, &HashMap::new());
    // No server knows a map: then there is no loss to be told of.
    let fresh = World::new(shm, 2, 1);
    let unknown = changed(&fresh, &["0", "1"], Change::Lost, "2");
    assert!(matches!(unknown, Err(MembershipError::Unknown { .. })), "{unknown:?}");
}

#[test]
fn a_server_that_knows_no_map_is_sent_one_packet_at_a_time() {
    let mut world = World::new(shm, 3, 1);
    changed(&world, &["0", "1"], Change::Join, "2").unwrap();
    world.end(2);
    world.start();
    world.targets.lock().unwrap().swap(2, 3);
    let mut client = world.client_of(&["0".to_owned()]);
    let ring = HashRing::new(["0", "1", "2"].map(str::to_owned));
    let keys: Vec<[u8; 4]> = (0..4000_u32)
        .map(u32::to_le_bytes)
        .filter(|key| ring.server_of(key) == ring.position("2"))
        .collect();
    // No two values are equal, or a packet would hold them all.
    let values: Vec<Vec<u8>> = keys.iter().map(|key| key.repeat(125)).collect();
    let puts = keys.iter().zip(&values).map(|(key, value)| Request::put(key, value));
    let puts: Vec<Request<'_>> = puts.collect();
    let outcome = client.execute(&puts, &mut |_, _, _| panic!("it refuses all"));
    assert!(matches!(outcome, Err(DirectClientError::Forgot { .. })), "{outcome:?}");
    // Were more under way when it is told, what it refused would be executed after what it did not.
    let service = world.services[3].as_ref().unwrap();
    // Its figures come a little later than its answers.
    let asked = 50;
    for _ in 0..asked {
        reports(&mut world.connect(LinkOptions::default()), "2").unwrap();
    }
    let until = Instant::now() + LIMIT;
    let (mut before, mut now) = (0, 0);
    while now < asked || now != before {
        assert!(Instant::now() < until, "{now} operations");
        std::thread::sleep(Duration::from_millis(50));
        (before, now) = (now, service.operations());
    }
    assert!(puts.len() > 1000 && now < asked + 100, "{now} operations of {} came", puts.len());
}
