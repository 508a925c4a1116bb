//! Sets of very many connections: silent ones are noted on a board, without a doorbell each.
//!
//! `BEELINE_WAKE_SECONDS=n` for each random test (else one; 60 with `BEELINE_DEEP=1`), `BEELINE_SEED=n`.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

mod common;

use std::collections::HashSet;
use std::net::TcpStream;
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_sockets::kernel::Errno;
use beeline_sockets::recall::{NotRecalled, recall};
use beeline_sockets::{connection, epoll, kernel, poll, table, wake};
use common::races::{
    Chance, close, close_sets, fresh_set, give, number, pair, rearm, take, take_all, time, watch,
};

const BRIEF: Option<Duration> = Some(Duration::from_millis(5));
const MANY: usize = 200;

fn bells(pairs: &[[TcpStream; 2]]) -> usize {
    pairs.iter().map(|pair| kernel::unread(pair[1].as_raw_fd())).sum()
}

/// Pairs whose asking ends have gone over to their rings: what the kernel carries are doorbells.
fn spoken() -> Vec<[TcpStream; 2]> {
    let pairs: Vec<_> = (0..MANY).map(|_| pair()).collect();
    say(&pairs);
    for pair in &pairs {
        assert_eq!(take(pair[1].as_raw_fd(), &mut [0; 9], 0), Ok(1));
    }
    pairs
}

fn watched(set: RawFd, edge: bool) -> Vec<[TcpStream; 2]> {
    let pairs = spoken();
    let edge = if edge { libc::EPOLLET } else { 0 };
    for pair in &pairs {
        let fd = pair[1].as_raw_fd();
        let events = (libc::EPOLLIN | edge) as u32;
        let event = libc::epoll_event { events, u64: u64::try_from(fd).unwrap() };
        assert!(epoll::control(set, libc::EPOLL_CTL_ADD, fd, Some(event)).unwrap().is_ok());
    }
    // A sleep: all are let go, with places.
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
    assert_eq!(epoll::wait(set, &mut events, BRIEF, None), Some(Ok(0)));
    // The first 31 were let go, or are looked at, before there were many of one program: they have theirs
    // with their next bell. What the tests beside this one stir may heat them, and have a few rung for again.
    assert!(epoll::hot(set) < 32, "the others have places");
    // A program that has looked for boards for too long, as beside many other tests, rings for a while instead.
    let begun = Instant::now();
    loop {
        say(&pairs);
        let rung = bells(&pairs);
        hears_all(set, &pairs);
        let_go(set);
        if rung < MANY / 2 {
            return pairs;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{rung} have no places");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until all of `pairs` were reported, each read when it is, and nothing else is.
fn hears_all(set: RawFd, pairs: &[[TcpStream; 2]]) {
    let mut left: HashSet<u64> =
        pairs.iter().map(|pair| u64::try_from(pair[1].as_raw_fd()).unwrap()).collect();
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 24];
    while !left.is_empty() {
        let count = epoll::wait(set, &mut events, BRIEF, None).unwrap().unwrap();
        assert!(count > 0, "{} of {} were not heard", left.len(), pairs.len());
        for event in &events[..count] {
            let fd = { event.u64 };
            assert!(left.remove(&fd), "{fd} was reported and has nothing");
            assert_eq!(take(RawFd::try_from(fd).unwrap(), &mut [0; 9], 0), Ok(1));
        }
    }
    assert_eq!(epoll::wait(set, &mut events, BRIEF, None), Some(Ok(0)));
}

fn say(pairs: &[[TcpStream; 2]]) {
    for pair in pairs {
        assert_eq!(give(pair[0].as_raw_fd(), b"x", 0), Ok(1));
    }
}

fn told_without_bells(edge: bool) {
    let set = fresh_set();
    let pairs = watched(set, edge);
    // A sender that may not look for a board rings for a while, as when a look of its was cut short by
    // other threads: three turns in a row have no bell in the end.
    let (mut silent, begun) = (0, Instant::now());
    while silent < 3 {
        say(&pairs);
        let rung = bells(&pairs);
        hears_all(set, &pairs);
        if rung == 0 {
            assert_eq!(epoll::hot(set), 0, "what is noted need not be looked at");
            silent += 1;
            continue;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{rung} are rung for, and nobody sleeps"
        );
        silent = 0;
        let_go(set);
        std::thread::sleep(Duration::from_millis(10));
    }
    close_sets(&[set]);
    pairs.into_iter().for_each(close);
}

#[test]
fn an_edge_triggered_set_that_is_awake_is_told_of_silent_connections_without_a_bell() {
    told_without_bells(true);
}

#[test]
fn a_level_triggered_set_that_is_awake_is_told_of_silent_connections_without_a_bell() {
    told_without_bells(false);
}

#[test]
fn a_sleep_on_very_many_connections_ends_with_any_and_is_rung_for_once() {
    let set = fresh_set();
    let pairs = watched(set, false);
    for round in 0..20 {
        let (one, other) = (round * 7 % MANY, (round * 7 + 3) % MANY);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
                let late = Some(Duration::from_secs(20));
                assert!(epoll::wait(set, &mut events, late, None).unwrap().unwrap() > 0);
            });
            std::thread::sleep(Duration::from_millis(3));
            say(&pairs[one..=one]);
            say(&pairs[other..=other]);
        });
        assert!(bells(&pairs) <= 1, "one sleep, one bell");
        for at in [one, other] {
            assert_eq!(take(pairs[at][1].as_raw_fd(), &mut [0; 9], 0), Ok(1));
        }
    }
    close_sets(&[set]);
    pairs.into_iter().for_each(close);
}

#[test]
fn the_sleep_in_which_places_are_first_given_is_rung_for() {
    let set = fresh_set();
    let pairs = spoken();
    for pair in &pairs {
        rearm(set, pair[1].as_raw_fd(), libc::EPOLL_CTL_ADD, false);
    }
    std::thread::scope(|scope| {
        let begun = Instant::now();
        let waiting = scope.spawn(|| {
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
            epoll::wait(set, &mut events, Some(Duration::from_secs(20)), None)
        });
        std::thread::sleep(Duration::from_millis(30));
        say(&pairs[150..=150]);
        assert_eq!(waiting.join().unwrap(), Some(Ok(1)));
        // A wait whose time is up looks once more: then it was heard without a bell.
        assert!(begun.elapsed() < Duration::from_secs(10), "no bell");
    });
    close_sets(&[set]);
    pairs.into_iter().for_each(close);
}

#[test]
fn a_board_outlives_the_connection_that_lent_it() {
    let set = fresh_set();
    let mut pairs = watched(set, false);
    say(&pairs);
    hears_all(set, &pairs);
    // Whichever lends the board is among those that go, more than once.
    while pairs.len() > 10 {
        let gone: Vec<_> = pairs.drain(..10).collect();
        // The sender's end first, or the set's.
        for (turn, [asks, hears]) in gone.into_iter().enumerate() {
            let order = if turn % 2 == 0 { [asks, hears] } else { [hears, asks] };
            close(order);
        }
        say(&pairs);
        hears_all(set, &pairs);
    }
    close_sets(&[set]);
    pairs.into_iter().for_each(close);
}

#[test]
fn an_entry_that_becomes_one_shot_or_leaves_has_no_place_any_more() {
    let set = fresh_set();
    let pairs = watched(set, false);
    let (first, rest) = pairs.split_first().unwrap();
    let fd = first[1].as_raw_fd();
    rearm(set, fd, libc::EPOLL_CTL_MOD, true);
    say(&pairs);
    hears_all(set, &pairs);
    // Silent now, while the set sleeps: what others say is heard all the same.
    say(&pairs[..1]);
    say(rest);
    hears_all(set, rest);
    epoll::control(set, libc::EPOLL_CTL_DEL, fd, None).unwrap().unwrap();
    say(&pairs[..1]);
    say(rest);
    hears_all(set, rest);
    close_sets(&[set]);
    pairs.into_iter().for_each(close);
}

/// Of all that have a place: the names of the boards.
fn boards<'a>(pairs: impl IntoIterator<Item = &'a [TcpStream; 2]>) -> Vec<u64> {
    let signs =
        |pair: &[TcpStream; 2]| &connection::find(pair[1].as_raw_fd()).unwrap().segment.own().signs;
    let armed = |pair| signs(pair).receive_armed.load(Ordering::SeqCst);
    let places = pairs.into_iter().map(armed).filter(|&armed| wake::is_place(armed));
    places.map(wake::board_of).collect()
}

fn lends(pair: &[TcpStream; 2]) -> u64 {
    let own = &connection::find(pair[1].as_raw_fd()).unwrap().segment;
    own.own_board().name.load(Ordering::SeqCst)
}

/// Until all that are silent are let go, and have places where there are any.
fn let_go(set: RawFd) {
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
    for _ in 0..40 {
        while epoll::wait(set, &mut events, Some(Duration::from_micros(1)), None).unwrap().unwrap()
            > 0
        {}
    }
    assert_eq!(epoll::wait(set, &mut events, BRIEF, None), Some(Ok(0)));
}

#[test]
fn lenders_that_go_one_after_another_leave_room_for_others() {
    let set = fresh_set();
    let mut pairs = watched(set, false);
    let (mut silent, mut gone) = (Vec::new(), 0);
    while gone < 24 {
        say(&pairs);
        hears_all(set, &pairs);
        let_go(set);
        let speak = boards(&pairs);
        assert!(speak.len() + 2 > pairs.len(), "{} of {} have places", speak.len(), pairs.len());
        // One that speaks stays silent from now on, on the board whose lender goes.
        let names: HashSet<u64> = boards(pairs.iter().chain(&silent)).into_iter().collect();
        assert!(names.len() <= 2, "{} boards for {} connections", names.len(), pairs.len());
        let lends_one = |pair: &[TcpStream; 2]| names.contains(&lends(pair));
        let lender = match pairs.iter().position(lends_one) {
            Some(lender) => pairs.swap_remove(lender),
            // A silent one that the tests beside this one stirred was let go again, and lends.
            None => silent.swap_remove(silent.iter().position(lends_one).expect("a lender")),
        };
        close(lender);
        // No lender itself: where there are two boards, the next one is to go as well.
        let quiet = pairs.iter().position(|pair| lends(pair) == 0).unwrap();
        silent.push(pairs.remove(quiet));
        gone += 1;
    }
    close_sets(&[set]);
    pairs.into_iter().chain(silent).for_each(close);
}

#[test]
fn a_board_that_the_sender_does_not_have_is_replaced() {
    let set = fresh_set();
    let mut pairs = watched(set, false);
    let lender = pairs.iter().position(|pair| lends(pair) != 0).unwrap();
    let lender = pairs.swap_remove(lender);
    // As where the sender forked, and another process of its has this end: nobody says that it closed.
    let asks = lender[0].as_raw_fd();
    connection::find(asks).unwrap().segment.own().sharing.processes.store(1, Ordering::SeqCst);
    table::forget(asks);
    let rung = || {
        say(&pairs);
        let rung = bells(&pairs);
        hears_all(set, &pairs);
        let_go(set);
        rung
    };
    assert!(rung() > MANY / 2, "the sender does not have it");
    let begun = Instant::now();
    while rung() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "the set gives no other");
        std::thread::sleep(Duration::from_millis(10));
    }
    close_sets(&[set]);
    pairs.into_iter().chain([lender]).for_each(close);
}

fn back(streams: &[TcpStream; 2]) -> Result<(), NotRecalled> {
    let sockets = [streams[0].as_fd(), streams[1].as_fd()];
    let segment = &connection::find(streams[0].as_raw_fd()).unwrap().segment;
    recall(segment, sockets, [Duration::from_secs(60); 2])
}

#[test]
fn connections_that_went_back_to_the_kernel_are_heard_and_keep_no_bell_from_the_others() {
    for edge in [true, false] {
        let set = fresh_set();
        let pairs = watched(set, edge);
        say(&pairs);
        hears_all(set, &pairs);
        // Whichever lends the board is among them.
        for share in pairs.chunks(MANY / 4) {
            for pair in share {
                back(pair).unwrap();
            }
            for round in 0..3 {
                let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        let late = Some(Duration::from_secs(20));
                        while epoll::wait(set, &mut events, late, None).unwrap().unwrap() == 0 {}
                    });
                    std::thread::sleep(Duration::from_millis(10));
                    say(&pairs[round..]);
                    say(&pairs[..round]);
                });
                // What that wait told of is told again, as of entries that were put in afresh.
                for pair in &pairs {
                    let event = libc::epoll_event {
                        events: (libc::EPOLLIN | if edge { libc::EPOLLET } else { 0 }) as u32,
                        u64: u64::try_from(pair[1].as_raw_fd()).unwrap(),
                    };
                    let fd = pair[1].as_raw_fd();
                    epoll::control(set, libc::EPOLL_CTL_MOD, fd, Some(event)).unwrap().unwrap();
                }
                hears_all(set, &pairs);
            }
        }
        close_sets(&[set]);
        pairs.into_iter().for_each(close);
    }
}

/// Echoes what the set reports until it reports `stop`.
fn serve(set: RawFd, stop: RawFd) {
    loop {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
        let count = epoll::wait(set, &mut events, None, None).unwrap().unwrap();
        for event in &events[..count] {
            let fd = RawFd::try_from(event.u64).unwrap();
            if fd == stop {
                return;
            }
            let mut bytes = [0; 64];
            loop {
                match take(fd, &mut bytes, libc::MSG_DONTWAIT) {
                    Ok(count) => assert_eq!(give(fd, &bytes[..count], 0), Ok(count)),
                    Err(Errno(libc::EAGAIN)) => break,
                    Err(error) => panic!("{error:?}"),
                }
            }
        }
    }
}

/// One of the things that may befall a connection of a set, or the set.
fn meddle(chance: &mut Chance, set: RawFd, pairs: &[[TcpStream; 2]], mode: i32) {
    let pair = &pairs[chance.below(pairs.len() as u64) as usize];
    let fd = pair[1].as_raw_fd();
    let data = u64::try_from(fd).unwrap();
    let change = |how: i32, wanted: i32| {
        let event = libc::epoll_event { events: (wanted | mode) as u32, u64: data };
        epoll::control(set, how, fd, Some(event)).unwrap().unwrap();
    };
    match chance.below(8) {
        0 | 1 => _ = back(pair),
        2 => {
            epoll::control(set, libc::EPOLL_CTL_DEL, fd, None).unwrap().unwrap();
            chance.idle();
            change(libc::EPOLL_CTL_ADD, libc::EPOLLIN);
        }
        3 => {
            change(libc::EPOLL_CTL_MOD, libc::EPOLLIN | libc::EPOLLRDHUP);
            chance.idle();
            change(libc::EPOLL_CTL_MOD, libc::EPOLLIN);
        }
        4 => {
            let copy = unsafe { libc::dup(fd) };
            table::duplicate(fd, copy);
            chance.idle();
            connection::closing(copy);
            unsafe { libc::close(copy) };
        }
        // As before a `fork`.
        5 => {
            let own = connection::find(fd).unwrap().segment.own();
            own.sharing.processes.store(1, Ordering::SeqCst);
        }
        6 => {
            let mut entry = [libc::pollfd { fd: set, events: libc::POLLIN, revents: 0 }];
            let brief = Duration::from_micros(chance.below(2000));
            let _ = poll::poll(&mut entry, Some(brief), None);
        }
        _ => {
            let mut entry = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
            let brief = Duration::from_micros(chance.below(500));
            let _ = poll::poll(&mut entry, Some(brief), None);
        }
    }
}

fn whatever_befalls_them(edge: bool, servers: usize) {
    let seed = number("BEELINE_SEED").unwrap_or(1).max(1);
    let (moved, done, begun) = (AtomicU64::new(0), AtomicBool::new(false), Instant::now());
    let (mut chance, mut rounds) = (Chance(seed), 0);
    let what =
        format!("messages through a set with boards, edge-triggered: {edge}, {servers} threads");
    let (what, mode) = (what.as_str(), if edge { libc::EPOLLET } else { 0 });
    watch(what, seed, &moved, &done, || {
        while begun.elapsed() < time() {
            let set = fresh_set();
            let pairs = watched(set, edge);
            let stop = pair();
            let stopper = stop[1].as_raw_fd();
            rearm(set, stopper, libc::EPOLL_CTL_ADD, false);
            let (until, over) =
                (Instant::now() + Duration::from_millis(400), AtomicBool::new(false));
            std::thread::scope(|scope| {
                for _ in 0..servers {
                    scope.spawn(|| serve(set, stopper));
                }
                let seeds = [chance.next(), chance.next()];
                let meddling = chance.next();
                let meddler = scope.spawn({
                    let (pairs, over) = (&pairs, &over);
                    move || {
                        let mut chance = Chance(meddling);
                        while !over.load(Ordering::Acquire) {
                            meddle(&mut chance, set, pairs, mode);
                            chance.idle();
                        }
                    }
                });
                let askers = [0, 1].map(|half| {
                    let (pairs, moved) = (&pairs[half * MANY / 2..][..MANY / 2], &moved);
                    scope.spawn(move || ask(&mut Chance(seeds[half] | 1), pairs, until, moved))
                });
                askers.into_iter().for_each(|asker| asker.join().unwrap());
                over.store(true, Ordering::Release);
                meddler.join().unwrap();
                // Level-triggered and never read: every server hears it.
                give(stop[0].as_raw_fd(), b"stop", 0).unwrap();
            });
            rounds += 1;
            close_sets(&[set]);
            pairs.into_iter().chain([stop]).for_each(close);
        }
    });
    let all = moved.load(Ordering::Relaxed);
    common::races::say(&format!("{all} {what}, {rounds} rounds, seed {seed}"));
}

/// Asks on some at a time, and waits for the answers.
fn ask(chance: &mut Chance, pairs: &[[TcpStream; 2]], until: Instant, moved: &AtomicU64) {
    while Instant::now() < until {
        let first = chance.below(pairs.len() as u64) as usize;
        let asked: Vec<_> = (0..1 + chance.below(12) as usize)
            .map(|turn| pairs[(first + turn * 7) % pairs.len()][0].as_raw_fd())
            .collect();
        for &fd in &asked {
            let byte = [fd as u8];
            assert_eq!(give(fd, &byte, 0), Ok(1));
            if chance.below(4) == 0 {
                chance.idle();
            }
        }
        for &fd in &asked {
            let mut answer = [0];
            take_all(fd, &mut answer);
            assert_eq!(answer, [fd as u8]);
            moved.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_level_triggered_set_hears_each_whatever_befalls_its_connections() {
    whatever_befalls_them(false, 1);
}

#[test]
fn an_edge_triggered_set_hears_each_whatever_befalls_its_connections() {
    whatever_befalls_them(true, 1);
}

#[test]
fn threads_that_share_a_set_with_boards_hear_each() {
    whatever_befalls_them(false, 2);
}
