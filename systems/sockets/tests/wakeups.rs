//! No wake-up is lost: idle times and bursts at random, between threads that block, and through an
//! epoll set of many connections. Who waits, waits without a time-out; who is not answered in time
//! says so.
//!
//! `BEELINE_WAKE_SECONDS=n` for each test (else one; 60 with `BEELINE_DEEP=1`), `BEELINE_SEED=n`.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

mod common;

use std::os::fd::{AsRawFd as _, IntoRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_sockets::connection;
use beeline_sockets::kernel::{self, Errno};
use beeline_sockets::{epoll, poll, table};
use common::races::{
    Chance, close, close_sets, fresh_set, give, number, pair, rearm, say, take, take_all, time,
    watch,
};

#[test]
fn a_blocking_conversation_with_pauses_and_bursts_never_stalls() {
    let seed = number("BEELINE_SEED").unwrap_or(1).max(1);
    // A small ring, so that writers wait too.
    let streams = pair();
    let (one, other) = (streams[0].as_raw_fd(), streams[1].as_raw_fd());
    let (moved, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let length = |chance: &mut Chance| match chance.below(6) {
        0 => chance.below(9000),
        1 => chance.below(600),
        _ => chance.below(40),
    } as usize + 1;
    watch("blocking", seed, &moved, &done, || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut chance, mut bytes) = (Chance(seed * 77 + 1), vec![0; 9001]);
                loop {
                    let mut head = [0; 4];
                    take_all(other, &mut head);
                    let length = u32::from_le_bytes(head) as usize;
                    if length == 0 {
                        return;
                    }
                    chance.idle();
                    take_all(other, &mut bytes[..length]);
                    chance.idle();
                    assert_eq!(give(other, &bytes[..length], 0), Ok(length));
                }
            });
            let (mut chance, begun) = (Chance(seed), Instant::now());
            let (mut bytes, mut answer) = (vec![0; 9001], vec![0; 9001]);
            while begun.elapsed() < time() {
                let length = length(&mut chance);
                bytes[..length].fill(chance.next() as u8);
                give(one, &(length as u32).to_le_bytes(), 0).unwrap();
                chance.idle();
                assert_eq!(give(one, &bytes[..length], 0), Ok(length));
                take_all(one, &mut answer[..length]);
                assert_eq!(answer[..length], bytes[..length]);
                moved.fetch_add(1, Ordering::Relaxed);
            }
            give(one, &0_u32.to_le_bytes(), 0).unwrap();
        });
    });
    say(&format!("{} blocking conversations, seed {seed}", moved.load(Ordering::Relaxed)));
    close(streams);
}

/// Serves what a set reports: echoes until the set says an end on `stop`.
fn serve(set: RawFd, stop: RawFd, edge: bool, handled: &AtomicU64) {
    let mut bytes = [0; 512];
    loop {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
        let count = match epoll::wait(set, &mut events, None, None).unwrap() {
            Ok(count) => count,
            Err(error) => {
                assert_eq!(error, Errno(libc::EINTR));
                continue;
            }
        };
        for event in &events[..count] {
            let fd = RawFd::try_from(event.u64).unwrap();
            if fd == stop {
                return;
            }
            loop {
                match take(fd, &mut bytes, libc::MSG_DONTWAIT) {
                    Ok(count) => {
                        handled.fetch_add(1, Ordering::Relaxed);
                        assert_eq!(give(fd, &bytes[..count], 0), Ok(count));
                    }
                    Err(Errno(libc::EAGAIN)) => break,
                    Err(error) => panic!("{error:?}"),
                }
                if !edge {
                    break;
                }
            }
            if !edge {
                continue;
            }
            rearm(set, fd, libc::EPOLL_CTL_MOD, edge);
        }
    }
}

fn through_a_set(what: &str, connections: usize, servers: usize, edge: bool) {
    let seed = number("BEELINE_SEED").unwrap_or(1).max(1);
    let pairs: Vec<_> = (0..connections).map(|_| pair()).collect();
    let stop = pair();
    let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    assert!(set >= 0);
    for pair in &pairs {
        rearm(set, pair[1].as_raw_fd(), libc::EPOLL_CTL_ADD, edge);
    }
    let stopper = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: u64::try_from(stop[1].as_raw_fd()).unwrap(),
    };
    epoll::control(set, libc::EPOLL_CTL_ADD, stop[1].as_raw_fd(), Some(stopper)).unwrap().unwrap();
    let (moved, done, handled) = (AtomicU64::new(0), AtomicBool::new(false), AtomicU64::new(0));
    watch(what, seed, &moved, &done, || {
        std::thread::scope(|scope| {
            for _ in 0..servers {
                scope.spawn(|| serve(set, stop[1].as_raw_fd(), edge, &handled));
            }
            let (mut chance, begun) = (Chance(seed), Instant::now());
            let mut answer = [0; 400];
            while begun.elapsed() < time() {
                // A few of them, most often the same ones.
                let many = chance.below(5) as usize + 1;
                let range = if chance.below(4) == 0 { connections } else { connections.min(6) };
                let mut asked: Vec<(RawFd, Vec<u8>)> = Vec::new();
                for _ in 0..many {
                    let fd = pairs[chance.below(range as u64) as usize][0].as_raw_fd();
                    if asked.iter().any(|(other, _)| *other == fd) {
                        continue;
                    }
                    let bytes = vec![chance.next() as u8; chance.below(400) as usize + 1];
                    assert_eq!(give(fd, &bytes, 0), Ok(bytes.len()));
                    asked.push((fd, bytes));
                    if chance.below(2) == 0 {
                        chance.idle();
                    }
                }
                for (fd, bytes) in &asked {
                    take_all(*fd, &mut answer[..bytes.len()]);
                    assert_eq!(answer[..bytes.len()], bytes[..]);
                    moved.fetch_add(1, Ordering::Relaxed);
                }
                chance.idle();
            }
            // Level-triggered and never read: every server hears it.
            give(stop[0].as_raw_fd(), b"stop", 0).unwrap();
        });
    });
    say(&format!("{} {what}, seed {seed}", moved.load(Ordering::Relaxed)));
    connection::closing(set);
    unsafe { libc::close(set) };
    pairs.into_iter().chain([stop]).for_each(close);
}

#[test]
fn a_set_of_many_mostly_idle_connections_hears_each() {
    through_a_set("messages through a level-triggered set of 200", 200, 1, false);
}

#[test]
fn threads_that_share_an_edge_triggered_one_shot_set_hear_each() {
    through_a_set("messages through a set that two threads share", 40, 2, true);
}

#[test]
fn a_wait_on_a_set_looks_at_no_connection_that_has_been_idle() {
    let pairs: Vec<_> = (0..300).map(|_| pair()).collect();
    let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    for pair in &pairs {
        rearm(set, pair[1].as_raw_fd(), libc::EPOLL_CTL_ADD, false);
    }
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
    let brief = Some(Duration::from_millis(5));
    assert_eq!(epoll::wait(set, &mut events, brief, None), Some(Ok(0)));
    assert_eq!(epoll::hot(set), 0, "after a sleep, only a doorbell makes one worth a look");
    assert_eq!(give(pairs[7][0].as_raw_fd(), b"x", 0), Ok(1));
    assert_eq!(epoll::wait(set, &mut events, brief, None), Some(Ok(1)));
    assert_eq!({ events[0].u64 }, u64::try_from(pairs[7][1].as_raw_fd()).unwrap());
    assert_eq!(epoll::hot(set), 1);
    // Level-triggered: until it was read.
    assert_eq!(epoll::wait(set, &mut events, brief, None), Some(Ok(1)));
    assert_eq!(take(pairs[7][1].as_raw_fd(), &mut [0; 9], 0), Ok(1));
    assert_eq!(epoll::wait(set, &mut events, brief, None), Some(Ok(0)));
    // A thread that blocks on one swallows its doorbell; the set is told all the same.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            give(pairs[9][0].as_raw_fd(), b"yz", 0).unwrap();
        });
        assert_eq!(take(pairs[9][1].as_raw_fd(), &mut [0; 1], 0), Ok(1));
    });
    assert_eq!(epoll::wait(set, &mut events, brief, None), Some(Ok(1)));
    connection::closing(set);
    unsafe { libc::close(set) };
    pairs.into_iter().for_each(close);
}

#[test]
fn a_set_that_sleeps_on_many_busy_connections_is_rung_for_once() {
    let pairs: Vec<_> = (0..50).map(|_| pair()).collect();
    let set = fresh_set();
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
    let brief = Some(Duration::from_millis(5));
    let say_all = || {
        for pair in &pairs {
            assert_eq!(give(pair[0].as_raw_fd(), b"x", 0), Ok(1));
        }
    };
    let read_all = || {
        for pair in &pairs {
            assert_eq!(take(pair[1].as_raw_fd(), &mut [0; 9], 0), Ok(1));
        }
    };
    for pair in &pairs {
        rearm(set, pair[1].as_raw_fd(), libc::EPOLL_CTL_ADD, false);
    }
    for round in 0..3 {
        say_all();
        assert_eq!(epoll::wait(set, &mut events, brief, None), Some(Ok(50)));
        read_all();
        // Asleep until its time is up: what it was armed with stays.
        assert_eq!(epoll::wait(set, &mut events, brief, None), Some(Ok(0)), "round {round}");
        assert_eq!(epoll::hot(set), 50, "all have just spoken");
        say_all();
        let bells: usize = pairs.iter().map(|pair| kernel::unread(pair[1].as_raw_fd())).sum();
        assert_eq!(bells, 1, "one sleep, one bell");
        assert_eq!(epoll::wait(set, &mut events, None, None), Some(Ok(50)));
        read_all();
        // One that sleeps on one of them alone has a bell of its own, whatever the set was rung for.
        assert_eq!(epoll::wait(set, &mut events, brief, None), Some(Ok(0)));
        give(pairs[1][0].as_raw_fd(), b"x", 0).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| take(pairs[2][1].as_raw_fd(), &mut [0; 1], 0).unwrap());
            std::thread::sleep(Duration::from_millis(20));
            give(pairs[2][0].as_raw_fd(), b"x", 0).unwrap();
        });
        assert_eq!(take(pairs[1][1].as_raw_fd(), &mut [0; 9], 0), Ok(1));
    }
    // Those that fall silent are let go.
    for _ in 0..40 {
        assert_eq!(
            epoll::wait(set, &mut events, Some(Duration::from_micros(1)), None),
            Some(Ok(0))
        );
    }
    assert_eq!(epoll::wait(set, &mut events, brief, None), Some(Ok(0)));
    assert_eq!(epoll::hot(set), 0);
    close_sets(&[set]);
    pairs.into_iter().for_each(close);
}

#[test]
fn a_connection_that_is_closed_takes_no_wake_up_of_another_with_it() {
    let stays = pair();
    let (asks, hears) = (stays[0].as_raw_fd(), stays[1].as_raw_fd());
    let set = fresh_set();
    rearm(set, hears, libc::EPOLL_CTL_ADD, false);
    let (moved, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let until = Instant::now() + time();
    watch("closed beside a sleeper", 0, &moved, &done, || {
        while Instant::now() < until {
            let [goes, closed] = pair();
            let (last, closed) = (goes.as_raw_fd(), closed.into_raw_fd());
            rearm(set, closed, libc::EPOLL_CTL_ADD, false);
            // Both are busy, so that one name is for both.
            for fd in [asks, last] {
                give(fd, b"x", 0).unwrap();
            }
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
            let mut heard = 0;
            while heard < 2 {
                heard += epoll::wait(set, &mut events, None, None).unwrap().unwrap();
                for event in &events[..heard.min(2)] {
                    let _ =
                        take(RawFd::try_from(event.u64).unwrap(), &mut [0; 9], libc::MSG_DONTWAIT);
                }
            }
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
                    loop {
                        let count = epoll::wait(set, &mut events, None, None).unwrap().unwrap();
                        let mine = |event: &libc::epoll_event| event.u64 == hears as u64;
                        if events[..count].iter().any(mine) {
                            break;
                        }
                    }
                    take_all(hears, &mut [0; 1]);
                });
                // Most rounds it sleeps by now.
                let asleep = Instant::now() + Duration::from_micros(120);
                while Instant::now() < asleep {
                    std::hint::spin_loop();
                }
                give(last, b"x", 0).unwrap();
                connection::closing(closed);
                unsafe { libc::close(closed) };
                give(asks, b"x", 0).unwrap();
            });
            moved.fetch_add(1, Ordering::Relaxed);
            connection::closing(last);
            drop(goes);
        }
    });
    say(&format!("{} connections closed beside a sleeper", moved.load(Ordering::Relaxed)));
    close_sets(&[set]);
    close(stays);
}

#[test]
fn a_connection_added_or_shut_beside_a_sleeping_thread_is_heard_by_it() {
    let (first, second) = (pair(), pair());
    let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    rearm(set, first[1].as_raw_fd(), libc::EPOLL_CTL_ADD, false);
    let (moved, done) = (AtomicU64::new(0), AtomicBool::new(false));
    watch("beside a sleeper", 0, &moved, &done, || {
        let hear = || {
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
            assert_eq!(epoll::wait(set, &mut events, None, None), Some(Ok(1)));
            let data = events[0].u64;
            RawFd::try_from(data).unwrap()
        };
        let fd = second[1].as_raw_fd();
        // Bytes before it was added, and after.
        for early in [true, false] {
            std::thread::scope(|scope| {
                let sleeper = scope.spawn(hear);
                std::thread::sleep(Duration::from_millis(20));
                if early {
                    give(second[0].as_raw_fd(), b"x", 0).unwrap();
                }
                rearm(set, fd, libc::EPOLL_CTL_ADD, false);
                if !early {
                    std::thread::sleep(Duration::from_millis(5));
                    give(second[0].as_raw_fd(), b"x", 0).unwrap();
                }
                assert_eq!(sleeper.join().unwrap(), fd);
            });
            assert_eq!(take(fd, &mut [0; 9], 0), Ok(1));
            epoll::control(set, libc::EPOLL_CTL_DEL, fd, None).unwrap().unwrap();
            moved.fetch_add(1, Ordering::Relaxed);
        }
        // Its own process shuts what the thread waits for.
        let fd = first[1].as_raw_fd();
        give(first[0].as_raw_fd(), b"y", 0).unwrap();
        assert_eq!(hear(), fd);
        assert_eq!(take(fd, &mut [0; 9], 0), Ok(1));
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(hear);
            std::thread::sleep(Duration::from_millis(20));
            let ours = connection::find(fd).unwrap();
            connection::shutdown(fd, ours, libc::SHUT_RD).unwrap();
            assert_eq!(sleeper.join().unwrap(), fd);
        });
        // The set knows it by another number.
        let (fd, copy) = (second[1].as_raw_fd(), unsafe { libc::dup(second[1].as_raw_fd()) });
        table::duplicate(fd, copy);
        epoll::control(set, libc::EPOLL_CTL_DEL, first[1].as_raw_fd(), None).unwrap().unwrap();
        rearm(set, copy, libc::EPOLL_CTL_ADD, false);
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(hear);
            std::thread::sleep(Duration::from_millis(20));
            let ours = connection::find(fd).unwrap();
            connection::shutdown(fd, ours, libc::SHUT_RD).unwrap();
            assert_eq!(sleeper.join().unwrap(), copy);
        });
        connection::closing(copy);
        unsafe { libc::close(copy) };
    });
    connection::closing(set);
    unsafe { libc::close(set) };
    [first, second].into_iter().for_each(close);
}

/// A wait as the preload library makes it.
fn wait_as_a_program(
    set: RawFd,
    events: &mut [libc::epoll_event],
    timeout: Option<Duration>,
) -> usize {
    loop {
        if let Some(outcome) = epoll::wait(set, events, timeout, None) {
            return outcome.unwrap();
        }
        if epoll::sleeps_plainly(set) {
            let reported = kernel::epoll_wait(set, events, timeout.map(poll::time), None).unwrap();
            if let Some(told) = epoll::wakes_plainly(set, events, reported) {
                return told;
            }
        }
    }
}

#[test]
fn a_thread_that_sleeps_on_a_set_without_ours_hears_of_the_first_with_the_programs_data() {
    let (moved, done) = (AtomicU64::new(0), AtomicBool::new(false));
    watch("beside a plain sleeper", 0, &moved, &done, || {
        for (turn, early) in (0..40).flat_map(|turn| [(turn, true), (turn, false)]) {
            let (set, pair) = (fresh_set(), pair());
            let fd = pair[1].as_raw_fd();
            std::thread::scope(|scope| {
                let sleeper = scope.spawn(|| {
                    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
                    assert_eq!(wait_as_a_program(set, &mut events, None), 1);
                    (RawFd::try_from(events[0].u64), { events[0].events })
                });
                // Now before the thread sleeps, now after.
                std::thread::sleep(Duration::from_micros(turn * 100));
                if early {
                    give(pair[0].as_raw_fd(), b"x", 0).unwrap();
                }
                rearm(set, fd, libc::EPOLL_CTL_ADD, false);
                if !early {
                    std::thread::sleep(Duration::from_micros(turn * 50));
                    give(pair[0].as_raw_fd(), b"x", 0).unwrap();
                }
                assert_eq!(sleeper.join().unwrap(), (Ok(fd), libc::EPOLLIN as u32));
            });
            moved.fetch_add(1, Ordering::Relaxed);
            close_sets(&[set]);
            close(pair);
        }
    });
}

#[test]
fn a_thread_that_sleeps_on_a_set_of_sets_hears_what_comes_into_the_inner_one() {
    let (moved, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let seed = number("BEELINE_SEED").unwrap_or(1).max(1);
    let polls = [false, true];
    watch("a set of sets", seed, &moved, &done, || {
        let mut chance = Chance(seed);
        for (turn, polls) in (0..30).flat_map(|turn| polls.map(|polls| (turn, polls))) {
            let (outer, inner) = (fresh_set(), fresh_set());
            let (old, new) = (pair(), pair());
            if turn % 2 == 0 {
                rearm(inner, old[1].as_raw_fd(), libc::EPOLL_CTL_ADD, false);
            }
            rearm(outer, inner, libc::EPOLL_CTL_ADD, false);
            std::thread::scope(|scope| {
                let sleeper = scope.spawn(|| {
                    loop {
                        if polls {
                            let mut entry =
                                [libc::pollfd { fd: inner, events: libc::POLLIN, revents: 0 }];
                            match poll::poll(&mut entry, None, None) {
                                Some(outcome) => assert_eq!(outcome, Ok(1)),
                                None => {
                                    assert_eq!(kernel::poll_many(&mut entry, None, None), Ok(1))
                                }
                            }
                        } else {
                            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
                            assert_eq!(wait_as_a_program(outer, &mut events, None), 1);
                        }
                        // It may be told of a doorbell.
                        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
                        if wait_as_a_program(inner, &mut events, Some(Duration::ZERO)) == 1 {
                            return RawFd::try_from(events[0].u64).unwrap();
                        }
                    }
                });
                chance.idle();
                let from = match turn % 3 {
                    0 => {
                        give(new[0].as_raw_fd(), b"x", 0).unwrap();
                        chance.idle();
                        rearm(inner, new[1].as_raw_fd(), libc::EPOLL_CTL_ADD, false);
                        &new
                    }
                    1 => {
                        rearm(inner, new[1].as_raw_fd(), libc::EPOLL_CTL_ADD, false);
                        chance.idle();
                        give(new[0].as_raw_fd(), b"x", 0).unwrap();
                        &new
                    }
                    _ if turn % 2 == 0 => {
                        give(old[0].as_raw_fd(), b"x", 0).unwrap();
                        &old
                    }
                    _ => {
                        give(old[0].as_raw_fd(), b"x", 0).unwrap();
                        rearm(inner, old[1].as_raw_fd(), libc::EPOLL_CTL_ADD, false);
                        &old
                    }
                };
                assert_eq!(sleeper.join().unwrap(), from[1].as_raw_fd());
            });
            moved.fetch_add(1, Ordering::Relaxed);
            close_sets(&[outer, inner]);
            close(old);
            close(new);
        }
    });
}

/// One of two threads that share an edge-triggered set is busy until the other has answered, while a
/// third takes bytes, and swallows doorbells, without asking the set.
#[test]
fn a_thread_that_is_busy_elsewhere_keeps_no_news_from_one_that_sleeps() {
    const CONNECTIONS: usize = 10;
    let seed = number("BEELINE_SEED").unwrap_or(1).max(1);
    let pairs: Vec<_> = (0..CONNECTIONS).map(|_| pair()).collect();
    let set = fresh_set();
    for pair in &pairs {
        let fd = pair[1].as_raw_fd();
        let event = libc::epoll_event {
            events: (libc::EPOLLIN | libc::EPOLLET) as u32,
            u64: u64::try_from(fd).unwrap(),
        };
        epoll::control(set, libc::EPOLL_CTL_ADD, fd, Some(event)).unwrap().unwrap();
    }
    let stop = pair();
    rearm(set, stop[1].as_raw_fd(), libc::EPOLL_CTL_ADD, false);
    let (moved, done, over) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
    // How many holds were asked for, and how many are over.
    let (held, released) = (AtomicU64::new(0), AtomicU64::new(0));
    let answer = |fd: RawFd, how: u8| {
        if how == b'h' {
            let mine = held.fetch_add(1, Ordering::AcqRel);
            while released.load(Ordering::Acquire) <= mine && !over.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        assert_eq!(give(fd, &[how], 0), Ok(1));
    };
    watch("one is busy", seed, &moved, &done, || {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 3];
                    loop {
                        let Some(Ok(count)) = epoll::wait(set, &mut events, None, None) else {
                            continue;
                        };
                        for event in &events[..count] {
                            let fd = RawFd::try_from(event.u64).unwrap();
                            if fd == stop[1].as_raw_fd() {
                                return;
                            }
                            let mut byte = [0];
                            while take(fd, &mut byte, libc::MSG_DONTWAIT) == Ok(1) {
                                answer(fd, byte[0]);
                            }
                        }
                    }
                });
            }
            scope.spawn(|| {
                let mut chance = Chance(seed * 31 + 7);
                while !over.load(Ordering::Acquire) {
                    chance.idle();
                    let fd = pairs[chance.below(CONNECTIONS as u64) as usize][1].as_raw_fd();
                    let mut byte = [0];
                    // What makes a thread busy is left to those who share the set.
                    if take(fd, &mut byte, libc::MSG_DONTWAIT | libc::MSG_PEEK) == Ok(1)
                        && byte[0] != b'h'
                        && take(fd, &mut byte, libc::MSG_DONTWAIT) == Ok(1)
                    {
                        answer(fd, byte[0]);
                    }
                }
            });
            let (mut chance, begun) = (Chance(seed), Instant::now());
            while begun.elapsed() < time() {
                let first = chance.below(CONNECTIONS as u64) as usize;
                let second =
                    (first + 1 + chance.below(CONNECTIONS as u64 - 1) as usize) % CONNECTIONS;
                let (first, second) = (pairs[first][0].as_raw_fd(), pairs[second][0].as_raw_fd());
                let before = held.load(Ordering::Acquire);
                let mut byte = [0];
                give(first, b"h", 0).unwrap();
                chance.idle();
                give(second, b"a", 0).unwrap();
                take_all(second, &mut byte);
                assert_eq!(byte, *b"a");
                chance.idle();
                give(second, b"b", 0).unwrap();
                take_all(second, &mut byte);
                assert_eq!(byte, *b"b");
                released.store(before + 1, Ordering::Release);
                take_all(first, &mut byte);
                assert_eq!(byte, *b"h");
                moved.fetch_add(1, Ordering::Relaxed);
                chance.idle();
            }
            over.store(true, Ordering::Release);
            // Level-triggered and never read: both hear it.
            give(stop[0].as_raw_fd(), b"stop", 0).unwrap();
        });
    });
    say(&format!("{} times one of two was busy, seed {seed}", moved.load(Ordering::Relaxed)));
    close_sets(&[set]);
    pairs.into_iter().chain([stop]).for_each(close);
}
